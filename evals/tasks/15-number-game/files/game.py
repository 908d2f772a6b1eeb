"""Guess the number: a little text game."""

import random
import re


class Game:
    """One game. `level` is the highest number, `seed` decides the secret one."""

    turns = 3

    def __init__(self, level: int, seed: int | None = None) -> None:
        self.level = level
        self.secret = random.Random(seed).randint(1, level)
        self.left = self.turns
        self.won = False

    def reset(self) -> str:
        """The first observation."""
        self.left, self.won = self.turns, False
        return (
            f"I am thinking of a number from 1 to {self.level}. You have {self.turns} guesses. "
            "Say: guess N"
        )

    def step(self, text: str) -> tuple[str, bool]:
        """(observation, is the game over). Whatever is said uses up a guess."""
        self.left -= 1
        found = re.fullmatch(r"guess (\d+)", text.strip().lower())
        if found and int(found[1]) == self.secret:
            self.won = True
            return "Right!", True
        if self.left == 0:
            return f"You lose. It was {self.secret}.", True
        if not found:
            return "I only understand: guess N", False
        return ("Too low." if int(found[1]) < self.secret else "Too high."), False
