"""Pictures with a four-way question each, drawn with Pillow: what the vision stand-in learns.

Every kind of question has its four answers in a fixed order: a model this small learns "red is A"
in a minute and "the letter that stands before red" never. Everything else varies: place, size,
tint of the background, colours, line widths, which side is labelled.
"""

from __future__ import annotations

import math
import random
from functools import cache
from typing import Any

from PIL import Image, ImageDraw, ImageFont

SIZE = 64
LETTERS = "ABCD"

CHOICES = {
    "colour": ("red", "blue", "green", "yellow"),
    "shape": ("circle", "square", "triangle", "star"),
    "count": ("1", "2", "3", "4"),
    "bars": ("first", "second", "third", "fourth"),
    "side": ("3", "4", "5", "6"),
}
KINDS = tuple(CHOICES)

# Several wordings, so that scripts with their own are understood too.
SUBJECTS = {
    "colour": (
        "What colour is the shape?",
        "Which colour does the shape have?",
        "What is the colour of the shape in the picture?",
    ),
    "shape": (
        "What kind of shape is this?",
        "Which shape is shown?",
        "What is the shape in the picture?",
    ),
    "count": (
        "How many shapes are there?",
        "How many shapes are in the picture?",
        "Count the shapes.",
    ),
    "bars": (
        "Which bar is the highest?",
        "Which of the four bars is the highest?",
        "Which bar shows the largest value?",
    ),
    "side": (
        "How long is the labelled side?",
        "What is the length of the side with a number?",
        "As shown in the figure, what is the length of the labelled side?",
    ),
}

COLOURS = {
    "red": (215, 40, 40),
    "blue": (45, 70, 215),
    "green": (40, 165, 60),
    "yellow": (235, 205, 40),
}
OTHER_COLOURS = ((120, 60, 160), (230, 130, 40), (60, 60, 60), (30, 150, 160), (150, 90, 50))

Colour = tuple[int, int, int]
Point = tuple[float, float]


@cache
def font(size: int) -> Any:
    return ImageFont.load_default(size)


def jitter(rng: random.Random, colour: Colour, amount: int) -> Colour:
    red, green, blue = (max(0, min(255, c + rng.randint(-amount, amount))) for c in colour)
    return red, green, blue


def canvas(rng: random.Random) -> tuple[Image.Image, ImageDraw.ImageDraw]:
    """A light background with a slight tint, sometimes framed."""
    image = Image.new("RGB", (SIZE, SIZE), jitter(rng, (240, 240, 240), 14))
    pen = ImageDraw.Draw(image)
    if rng.random() < 0.2:
        pen.rectangle((0, 0, SIZE - 1, SIZE - 1), outline=jitter(rng, (170, 170, 170), 30))
    return image, pen


def any_colour(rng: random.Random) -> Colour:
    return jitter(rng, rng.choice([*COLOURS.values(), *OTHER_COLOURS]), 18)


def corners(centre: Point, radius: float, count: int, turn: float) -> list[Point]:
    """The corners of a regular figure, the first one up when `turn` is 0."""
    return [
        (
            centre[0] + radius * math.sin(turn + 2 * math.pi * i / count),
            centre[1] - radius * math.cos(turn + 2 * math.pi * i / count),
        )
        for i in range(count)
    ]


def shape(
    rng: random.Random,
    pen: ImageDraw.ImageDraw,
    kind: str,
    centre: Point,
    radius: float,
    colour: Colour,
    is_filled: bool = True,
) -> None:
    """One of the four shapes; those that are not filled have a thick outline."""
    width = rng.randint(3, 4)
    edge = jitter(rng, (50, 50, 50), 30) if is_filled and rng.random() < 0.4 else colour
    if kind == "circle":
        x, y = centre
        box = (x - radius, y - radius, x + radius, y + radius)
        pen.ellipse(box, colour if is_filled else None, edge, 1 if is_filled else width)
        return
    turn = rng.uniform(-0.15, 0.15)
    if kind == "square":
        points = corners(centre, radius * 1.2, 4, turn + math.pi / 4)
    elif kind == "triangle":
        points = corners(centre, radius * 1.2, 3, turn)
    else:
        outer = corners(centre, radius * 1.2, 5, turn)
        inner = corners(centre, radius * 0.5, 5, turn + math.pi / 5)
        points = [p for pair in zip(outer, inner, strict=True) for p in pair]
    pen.polygon(points, colour if is_filled else None, edge, 1 if is_filled else width)


def draw_one(rng: random.Random, kind: str, answer: int) -> Image.Image:
    """One shape: its colour or its kind is what is asked for, the other one varies."""
    image, pen = canvas(rng)
    if kind == "colour":
        name = rng.choice(CHOICES["shape"])
        colour = jitter(rng, COLOURS[CHOICES["colour"][answer]], 20)
    else:
        name, colour = CHOICES["shape"][answer], any_colour(rng)
    radius = rng.uniform(12, 22)
    edge = radius * 1.2 + 2
    centre = rng.uniform(edge, SIZE - edge), rng.uniform(edge, SIZE - edge)
    shape(rng, pen, name, centre, radius, colour, rng.random() < 0.75)
    return image


def draw_count(rng: random.Random, answer: int) -> Image.Image:
    """One to four shapes of one kind that do not touch."""
    image, pen = canvas(rng)
    name, colour = rng.choice(CHOICES["shape"]), any_colour(rng)
    is_mixed = rng.random() < 0.3
    radius = rng.uniform(6, 8)
    edge = radius * 1.2 + 1
    # Placed by chance; when the first ones leave no room for the last, all are placed again.
    centres: list[Point] = []
    for attempt in range(10_000):
        if len(centres) == answer + 1:
            break
        if attempt % 100 == 99:
            centres.clear()
        new = rng.uniform(edge, SIZE - edge), rng.uniform(edge, SIZE - edge)
        if all(math.dist(new, old) > 2.4 * radius + 5 for old in centres):
            centres.append(new)
    for centre in centres:
        shape(rng, pen, name, centre, radius, any_colour(rng) if is_mixed else colour)
    return image


def draw_bars(rng: random.Random, answer: int) -> Image.Image:
    """Four bars on a line, one of them higher than the others by an eighth of the picture."""
    image, pen = canvas(rng)
    bottom, left = rng.randint(54, 60), rng.randint(3, 8)
    pitch = rng.randint(12, 14)
    width = rng.randint(6, pitch - 3)
    top = rng.randint(26, 48)
    colour, is_mixed = any_colour(rng), rng.random() < 0.3
    for index in range(4):
        height = top if index == answer else rng.randint(5, top - 9)
        x = left + index * pitch
        fill = any_colour(rng) if is_mixed else colour
        pen.rectangle((x, bottom - height, x + width, bottom), fill=fill)
    pen.line((left - 2, bottom, left + 4 * pitch, bottom), (60, 60, 60), rng.randint(1, 2))
    return image


def draw_side(rng: random.Random, answer: int) -> Image.Image:
    """A triangle or a square in thin lines with a number beside one of its sides."""
    image, pen = canvas(rng)
    ink = jitter(rng, (50, 50, 60), 35)
    side = rng.uniform(17, 23)
    x, y = rng.uniform(20, 44 - side), rng.uniform(20, 44 - side)
    if rng.random() < 0.5:
        points = [(x, y), (x + side, y), (x + side, y + side), (x, y + side)]
    else:  # a triangle, sometimes with a right angle
        tip = x + side * rng.choice([0.0, 0.5, 1.0])
        points = [(tip, y), (x + side, y + side), (x, y + side)]
    pen.polygon(points, outline=ink, width=rng.randint(1, 2))
    middle = sum(p[0] for p in points) / len(points), sum(p[1] for p in points) / len(points)
    start = rng.randrange(len(points))
    a, b = points[start], points[(start + 1) % len(points)]
    centre = (a[0] + b[0]) / 2, (a[1] + b[1]) / 2
    # Outwards, at right angles to the side.
    across = b[1] - a[1], a[0] - b[0]
    if across[0] * (centre[0] - middle[0]) + across[1] * (centre[1] - middle[1]) < 0:
        across = -across[0], -across[1]
    scale = rng.uniform(11, 12) / math.hypot(*across)
    place = centre[0] + scale * across[0], centre[1] + scale * across[1]
    pen.text(place, CHOICES["side"][answer], ink, font(rng.randint(22, 24)), "mm")
    return image


REASONS = {
    "colour": "The shape is {}.",
    "shape": "It is a {}.",
    "count": "I count {}.",
    "bars": "The {} bar is the highest.",
    "side": "The side is {}.",
}


def row(rng: random.Random, number: int, kind: str = "") -> dict[str, Any]:
    """One picture in GeoQA's row schema, and its kind: {"id", "image" (Pillow), "subject",
    "choices", "label" (index), "answer" (the text of the choice)}."""
    kind = kind or rng.choice(KINDS)
    label = rng.randrange(4)
    if kind in ("colour", "shape"):
        image = draw_one(rng, kind, label)
    else:
        image = {"count": draw_count, "bars": draw_bars, "side": draw_side}[kind](rng, label)
    return {
        "id": f"{kind}-{number}",
        "image": image,
        "subject": rng.choice(SUBJECTS[kind]),
        "choices": list(CHOICES[kind]),
        "label": label,
        "answer": CHOICES[kind][label],
    }


def asked(row: dict[str, Any]) -> str:
    """The question and its choices, one a line, as prompts show them."""
    lines = [f"{letter}. {text}" for letter, text in zip(LETTERS, row["choices"], strict=True)]
    return "\n".join([row["subject"], *lines])


def reasoning(row: dict[str, Any]) -> str:
    """The sentence that an answer begins with."""
    return REASONS[row["id"].split("-")[0]].format(row["answer"])
