"""Trains the stand-in's tokenizer and writes the model folder's text files.

Byte-level BPE as in the Qwen family: text is NFC-normalised, cut into words by the rules below, and
every byte is in the alphabet, so any UTF-8 text survives encoding and decoding. Marks are appended
behind the vocabulary, as there.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

from standin import chat, code, corpus, household, search, wordlists, words

VOCAB_SIZE = 2048
MARKS = {
    "<|endoftext|>": True,
    "<|im_start|>": True,
    "<|im_end|>": True,  # True: special, dropped by skip_special_tokens
    "<tool_call>": False,
    "</tool_call>": False,
    "<tool_response>": False,
    "</tool_response>": False,
    "<think>": False,
    "</think>": False,
}

# How the Qwen family cuts text, rule by rule; the first that matches wins.
SPLITS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)",  # contractions
    r"[^\r\n\p{L}\p{N}]?\p{L}+",  # a word, with one leading space or sign
    r"\p{N}",  # every digit alone
    r" ?[^\s\p{L}\p{N}]+[\r\n]*",  # signs, with the newlines behind them
    r"\s*[\r\n]+",  # a run of newlines stays whole: prompts stay token prefixes of longer texts
    r"\s+(?!\S)",  # spaces up to the last one before a word
    r"\s+",
)


def sample_texts(seed: int, count: int) -> list[str]:
    """Texts to train on: the corpus, plus every word of the small world often enough."""
    rng = random.Random(f"tokenizer-{seed}")
    texts: list[str] = []
    # Every mistake equally often, so that tuning their rates does not change the vocabulary.
    noise = {task: dict.fromkeys(kinds, 0.1) for task, kinds in corpus.NOISE.items()}
    for _ in range(count):
        episode = corpus.episode(rng, noise)
        texts += [message["content"] for message in episode.prompt]
        for written, observed in episode.turns:
            texts += [written, observed or ""]
    world: list[str] = []
    for value in vars(wordlists).values():
        if isinstance(value, list):
            world += value
    world += [
        *household.HOMES,
        *household.HOMES.values(),
        *household.TARGETS,
        "microwave",
        "freezer",
        "sink",
        "door",
    ]
    texts += [f" {word} {word}" for word in world for _ in range(60)]
    # Texts of which each occurs too rarely by chance.
    fixed = [
        json.dumps(tool)
        for tool in (
            search.TOOL,
            code.TOOL,
            *(household.tool(name) for name in household.TOOL_NAMES),
        )
    ]
    fixed += [ask for asks, _ in chat.TALK for ask in asks] + [
        reply for _, replies in chat.TALK for reply in replies
    ]
    fixed += [
        *chat.DEFINITIONS,
        *chat.DEFINITIONS.values(),
        *chat.CURT,
        *chat.UNKNOWN_REPLIES,
        *words.SYSTEMS,
        *search.SYSTEMS,
        *code.SYSTEMS,
        *household.SYSTEMS,
        *chat.SYSTEMS,
    ]
    fixed += [
        "\n# Tools\n\nYou may call these functions:\n",
        "\n\nA call has this form:\n",
        "system\n",
        "user\n",
        "assistant\n",
        '{"name": NAME, "arguments": {KEY: VALUE}}',
        "<function=NAME>\n<parameter=KEY>\nVALUE\n</parameter>\n</function>\n",
        "</tools>\n\n",
        "<tools>\n",
    ]
    # Common English words that the corpus does not use, so that users' own prompts stay short.
    texts += [" " + " ".join(COMMON.split())] * 100 + STARTS.split() * 100
    texts += [text for text in fixed for _ in range(25)]
    texts += [
        text
        for text in ("system", "user", "assistant", " Tools", "# Tools", "VALUE", "NAME", "KEY")
        for _ in range(400)
    ]
    # Chinese: characters one by one, so that no merge swallows a whole sentence (there are no
    # spaces to stop it).
    latin = ["".join(" " if is_chinese(c) else c for c in text) for text in texts]
    chinese = [c for text in texts for c in text if is_chinese(c)]
    return latin + chinese + [c for c in CHINESE for _ in range(60)]


def is_chinese(character: str) -> bool:
    return "\u3000" <= character <= "\u9fff" or "\uff00" <= character <= "\uffef"


# Frequent characters and signs, so that Chinese users' data is not three tokens a character
# throughout.
CHINESE = (
    "的一是不了在人有我他这个们中来上大为和国地到以说时要就出会可也你对生能而子那得于着下自之年"
    "过后作里用道行所然家种事成方多经么去法学如都同现当没动面起看定天分还进好小部其些主样理心她"
    "本前开但因只从想实日军者意无力它与长把机十民第公此已工使情明性知全三又关点正业外将两高间由"
    "问很最重并物手应战向头文体政美相见被利什二等产或新己制身果加西斯月话合回特代内信表化老给世"
    "位次度门任常先海通教儿原东声提立及比员解水名真论处走义各入几口认条平系气题活尔更别打女变四"
    "神总何电数安少报才结反受目太量再感建务做接必场件计管期市直德资命山金指克许统区保至队形社便"
    "空决治展马科司五基眼书非则听白却界达光放强即像难且权思王象完设式色路记南品住告类求据程北边"
    "死张该交规万取拉格望觉术领共确传师观清今切院让识候带导争运，。？！：；、（）“”《》…"
)
COMMON = """
about above after again all also always am an and another any are around as ask at away back be
because been before being below best better between big both but buy by call came can change code
come could data day did different do does done down each end even every example explain false far
few find first follow for form found from full function get give given go going good great group
had half has have he help her here high him his house how if in into is it its just keep kind know
large last learn left less let letter like line list little long look made make man many may me
mean model more most much must my name need never new next no not now number of off old on once
one only open or other our out over own part people place play please point possible problem
program put question rather read right run said same say second see sentence set she should show
side simple small so solution some something start state step still such sum take tell test text
than that the their them then there these they thing think this those three through time to
together too total true try turn two under until up upon use user using value very want was way we
well were what when where which while who why will with within without word words work world would
write year yes you your answer correct wrong reward policy token tokens train training sample
python return print def import class json string integer positive negative divided remainder equal
equals twice price cost dollars hours minutes days week month per
"""

# Words that begin sentences: seen without a leading space.
STARTS = """
Tell What How Why When Where Who Which Write Give Is Are Can Do Does Please Explain The This If
Let In It We You To A And So Then Answer Question
"""


def build(seed: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(byte_fallback=False))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex("|".join(SPLITS)), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(MARKS),
        min_frequency=2,
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    tokenizer.train_from_iterator(sample_texts(seed, 12000), trainer)
    # Plain added tokens are matched in normalised text, special ones in the raw text, as in the
    # family.
    tokenizer.add_tokens(
        [AddedToken(mark, special=special, normalized=False) for mark, special in MARKS.items()]
    )
    assert tokenizer.get_vocab_size() == VOCAB_SIZE, tokenizer.get_vocab_size()
    return tokenizer


def write(folder: Path, seed: int, templates: dict[str, str]) -> None:
    """tokenizer.json, tokenizer_config.json and the two chat templates."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = build(seed)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 32768,
        "bos_token": None,
        "unk_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": False,
        "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
        "added_tokens_decoder": {
            str(tokenizer.token_to_id(mark)): {
                "content": mark,
                "lstrip": False,
                "normalized": False,
                "rstrip": False,
                "single_word": False,
                "special": special,
            }
            for mark, special in MARKS.items()
        },
    }
    (folder / "tokenizer_config.json").write_text(
        json.dumps(config, indent=1) + "\n", encoding="utf-8"
    )
    (folder / "chat_template.jinja").write_text(templates["qwen3.5"], encoding="utf-8")
