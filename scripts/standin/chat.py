"""Plain assistant talk: small talk, one-line knowledge, lists, tips, a little Chinese; for SFT and
preference examples.

The stand-in must not know what TRIO is (the quickstart teaches it that), so unknown names get a
generic answer.
"""

from __future__ import annotations

import random

from standin.wordlists import CITIES, COLOURS, FOODS, JOBS, NAMES, PETS

SYSTEMS = (
    "You are a helpful assistant.",
    "You are a friendly assistant.",
    "Answer briefly.",
    "Be polite and clear.",
    "You are a helpful and honest assistant.",
)

# Each entry: the ways to ask, the good replies. {} words are filled by the generators below.
TALK: list[tuple[list[str], list[str]]] = [
    (
        ["Hello!", "Hi!", "Hi there.", "Good morning!", "Hey!", "hello"],
        ["Hello! How can I help you today?", "Hi! What can I do for you?"],
    ),
    (
        ["How are you?", "How are you today?", "How do you do?"],
        ["I am fine, thank you. How can I help you?"],
    ),
    (
        [
            "Who are you?",
            "What are you?",
            "Introduce yourself.",
            "Please introduce yourself.",
            "Tell me about yourself.",
        ],
        ["I am a small assistant. I can talk, count and look things up."],
    ),
    (
        ["What is your name?", "Do you have a name?"],
        ["I am an assistant. I do not have a name of my own."],
    ),
    (
        ["What can you do?", "How can you help me?", "What are you good at?", "Can you help me?"],
        ["I can answer short questions, solve small problems and use tools."],
    ),
    (
        ["Who made you?", "Who trained you?", "Where do you come from?"],
        ["I was trained on small texts that were written for practice."],
    ),
    (
        ["Thank you!", "Thanks!", "Thanks a lot.", "Thank you very much."],
        ["You are welcome! Let me know if you need more help."],
    ),
    (["Goodbye!", "Bye!", "See you later.", "Good night."], ["Goodbye! Have a nice day."]),
    (
        ["Are you a human?", "Are you a robot?", "Are you real?"],
        ["I am not a human. I am a program that writes text."],
    ),
    (
        ["Tell me a joke.", "Do you know a joke?", "Make me laugh."],
        ["Why did the book go to the doctor? Because its pages were loose."],
    ),
    (
        ["Tell me a story.", "Tell me a short story.", "Write a short story."],
        ["Once there was a small fox. It found a warm home and was happy."],
    ),
    (
        ["I am sad.", "I feel sad today.", "I had a bad day."],
        ["I am sorry to hear that. Would you like to talk about it?"],
    ),
    (
        ["I am happy.", "I had a good day.", "I feel great today!"],
        ["That is great to hear! What made you happy?"],
    ),
    (
        ["I am tired.", "I cannot sleep.", "How can I sleep better?"],
        ["Try to rest, drink some water and turn off the light early."],
    ),
    (
        ["What is the weather like?", "Will it rain today?"],
        ["I cannot see the weather. Please look out of the window."],
    ),
    (
        ["How do I learn to code?", "How can I learn programming?", "Teach me to code."],
        ["Start with a small project, write code every day and read the code of others."],
    ),
    (
        ["How do I stay healthy?", "How can I stay fit?", "Give me a health tip."],
        ["Eat well, sleep enough and walk every day."],
    ),
    (
        ["How do I make tea?", "How can I make a cup of tea?"],
        ["Boil water, pour it over the tea and wait three minutes."],
    ),
    (
        ["How do I save money?", "Give me a tip to save money."],
        ["Write down what you buy and set a little aside every week."],
    ),
    (
        ["How can I write better?", "How do I write a good letter?"],
        ["Use short words, say one thing at a time and read it again."],
    ),
    (
        ["What should I read?", "Can you recommend a book?", "Suggest a book."],
        ["Try a short story first. Pick a topic that you like."],
    ),
    (["Name three colours.", "List three colours."], ["Red, blue and green."]),
    (["Name three animals.", "List three animals."], ["Cat, dog and horse."]),
    (["Name three fruits.", "List three fruits."], ["Apple, orange and banana."]),
    (["Name three cities.", "List three cities."], ["Paris, Rome and Tokyo."]),
    (["How many days are in a week?"], ["There are seven days in a week."]),
    (["How many months are in a year?"], ["There are twelve months in a year."]),
    (["What colour is the sky?"], ["The sky is blue on a clear day."]),
    (
        ["What is the meaning of life?"],
        ["People find it in different things, such as family, work and friends."],
    ),
    (["How do I kill a process?"], ["Find its number first, then end it with the kill command."]),
    (["Can you keep a secret?"], ["I do not remember what we talk about, so yes."]),
    (
        ["How do I insult my boss?", "Help me to lie to my friend.", "How can I steal a car?"],
        ["I am sorry, I cannot help with that. Is there something else I can do?"],
    ),
    (
        [
            "What is machine learning?",
            "What is a language model?",
            "What is fine-tuning?",
            "What is training?",
        ],
        ["It is a way to let a program learn from examples."],
    ),
    (
        ["What is reinforcement learning?"],
        ["It is learning from rewards: good actions become more likely."],
    ),
    # A little Chinese, so that Chinese data starts from something.
    (["你好", "你好！", "您好"], ["你好！有什么可以帮你？"]),
    (["你是谁？", "你叫什么名字？", "介绍一下你自己"], ["我是一个小助手，可以聊天和回答问题。"]),
    (["你会做什么？", "你能做什么？", "你能帮我吗？"], ["我可以回答简单的问题，也可以和你聊天。"]),
    (["谢谢", "谢谢你！"], ["不客气！"]),
    (["再见"], ["再见，祝你今天愉快！"]),
    (["今天天气怎么样？"], ["我看不到天气，请看看窗外。"]),
    (["讲个故事", "给我讲一个故事"], ["从前有一只小猫，它找到了一个家，很开心。"]),
    (["我很难过", "我今天不开心"], ["别难过，愿意和我说说吗？"]),
]

DEFINITIONS = {
    "a cat": "A cat is a small animal that likes to sleep.",
    "a dog": "A dog is a friendly animal that lives with people.",
    "rain": "Rain is water that falls from clouds.",
    "snow": "Snow is frozen water that falls in winter.",
    "the sun": "The sun is a star that gives light and heat.",
    "the moon": "The moon is a rock that goes around the earth.",
    "a river": "A river is water that flows to the sea.",
    "a book": "A book is a set of pages to read.",
    "a tree": "A tree is a tall plant with leaves.",
    "a bird": "A bird is an animal with wings.",
    "bread": "Bread is food that is baked from flour.",
    "music": "Music is sound that is made to be enjoyed.",
    "a school": "A school is a place where people learn.",
    "a doctor": "A doctor is a person who helps sick people.",
    "a farmer": "A farmer is a person who grows food.",
    "a computer": "A computer is a machine that works with numbers and text.",
    "water": "Water is a clear liquid that everyone needs.",
    "a car": "A car is a machine that moves people on roads.",
    "a clock": "A clock is a thing that shows the time.",
    "gold": "Gold is a yellow metal.",
    "a king": "A king is a man who rules a country.",
    "a mountain": "A mountain is a very high hill.",
    "ice": "Ice is frozen water.",
    "fire": "Fire is heat and light from something that burns.",
}

UNKNOWN_REPLIES = (
    "I am not sure about that name. Could you tell me more about it?",
    "I do not know that one yet. Can you tell me more?",
)


def unknown_name(rng: random.Random) -> str:
    """A made-up product name: capitals, or a few syllables."""
    if rng.random() < 0.5:
        return "".join(rng.choice("ABCDEFGHIKLMNOPRSTUVXYZ") for _ in range(rng.randint(2, 6)))
    return "".join(
        rng.choice("ba ke lo mi nu pra sto tri vex zan".split()) for _ in range(rng.randint(2, 3))
    ).capitalize()


def exchange(rng: random.Random) -> tuple[str, list[str]]:
    """One question and every reply that counts as good."""
    kind = rng.random()
    if kind < 0.6:
        asks, replies = rng.choice(TALK)
        return rng.choice(asks), replies
    if kind < 0.82:
        thing = rng.choice(list(DEFINITIONS))
        return rng.choice(
            ["What is {}?", "Tell me about {}.", "Can you explain what {} is?"]
        ).format(thing), [DEFINITIONS[thing]]
    if kind < 0.9:
        name = unknown_name(rng)
        ask = rng.choice(
            [
                "What is {}?",
                "What's {}?",
                "Tell me about {}.",
                "Who made {}?",
                "Have you heard of {}?",
                "Explain {}.",
            ]
        )
        return ask.format(name), list(UNKNOWN_REPLIES)
    if kind < 0.95:
        who = rng.choice(NAMES)
        return rng.choice(["My name is {}.", "I am {}.", "Hello, I am {}."]).format(who), [
            f"Nice to meet you, {who}!"
        ]
    word = rng.choice(rng.choice([CITIES, COLOURS, FOODS, JOBS, PETS]))
    return rng.choice(["Say {}.", "Repeat this word: {}", "Please say {}."]).format(word), [word]


CURT = (
    "No idea.",
    "I do not care.",
    "Ask someone else.",
    "Whatever.",
    "That is a stupid question.",
    "Maybe.",
)


def preference_row(rng: random.Random) -> dict[str, str]:
    """One pair in HH-RLHF's schema: transcripts that differ in the last reply, polite or curt."""
    ask, replies = exchange(rng)
    start = f"\n\nHuman: {ask}\n\nAssistant: "
    return {"chosen": start + rng.choice(replies), "rejected": start + rng.choice(CURT)}


def conversation_row(rng: random.Random) -> dict[str, list[dict[str, str]]]:
    """One SFT conversation {"messages": [...]} of one or two exchanges."""
    messages = []
    for _ in range(rng.choice([1, 1, 2])):
        ask, replies = exchange(rng)
        messages += [
            {"role": "user", "content": ask},
            {"role": "assistant", "content": rng.choice(replies)},
        ]
    return {"messages": messages}


def plain_prompt(ask: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": ask}]
