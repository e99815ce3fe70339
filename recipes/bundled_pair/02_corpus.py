"""Step 2: wheels and the standard library -> tokenizer and token arrays: `python 02_corpus.py WHEELS OUT`.

Files are filtered (tests, vendored, generated and tabular ones go, licence headers are cut), near duplicates dropped, and
packages split into train and held-out. The tokenizer is trained on the training text alone. Each stage leaves a file in OUT
and is skipped when that is there. Needs draftwood nowhere: it runs before any of it.
"""

from __future__ import annotations

import hashlib
import json
import lzma
import random
import re
import sys
import sysconfig
import zipfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

HELD_OUT = {"networkx", "tornado", "arcade", "trimesh", "luigi", "lark", "mopidy"}
VOCAB, SPECIAL = 4096, ["<|end|>", "<|mask|>"]
MAX_PACKAGE, MAX_FILE, MIN_FILE = 24_000_000, 200_000, 300  # characters
TOKENIZER_SAMPLE = 60_000_000  # characters of training text the merges are learnt from
PART_TOKENS = 88_000_000  # tokens per packed file, some 50 MB

SKIPPED_PARTS = re.compile(
    r"(^|/)(_?vendor(ed)?|_vendored_packages|thirdparty|third_party|externals?|extern|node_modules|migrations|locale|locales|"
    r"tests?|testing|test_.*|.*_tests?|conftest\.py|.*_pb2(_grpc)?\.py|_generated|generated|[^/]*\.dist-info|[^/]*\.data)(/|$)"
)
GENERATED = re.compile(
    r"(auto-?matically |auto-?)?generated (by|from|file|code)|do not edit|@generated", re.IGNORECASE
)
LICENCE = re.compile(r"copyright|licen[cs]e|spdx|all rights reserved", re.IGNORECASE)


def cleaned(text: str) -> str | None:
    """The text without its licence header, or None if it is not source that a person wrote line by line."""
    lines = text.replace("\r\n", "\n").replace("\t", "    ").split("\n")
    if GENERATED.search("\n".join(lines[:12])):
        return None
    head = next((i for i, line in enumerate(lines) if line.strip() and not line.startswith("#")), len(lines))
    if LICENCE.search("\n".join(lines[:head])):
        lines = lines[head:]
    lines = [line.rstrip() for line in lines]
    text = re.sub(r"\n{4,}", "\n\n\n", "\n".join(lines)).strip("\n") + "\n"
    full = [line for line in lines if line.strip()]
    if not MIN_FILE <= len(text) <= MAX_FILE or len(full) < 10 or max(map(len, full)) > 400:
        return None
    letters = sum(c.isalpha() or c.isspace() or c == "_" for c in text)
    table = sum(bool(re.match(r"""\s*[(\[{]?\s*['"\d\-]""", line)) for line in full)
    ascii_share = sum(c < "\x80" for c in text) / len(text)
    if letters < 0.6 * len(text) or table > 0.4 * len(full) or ascii_share < 0.97:
        return None
    return text


def sources(wheels: Path) -> Iterator[tuple[str, str, str]]:
    """(package, path, text) of every Python file, held-out packages first."""
    paths = sorted(wheels.glob("*.whl"), key=lambda p: (name_of(p) not in HELD_OUT, p.name.lower()))
    done_stdlib = False
    for wheel in paths:
        if name_of(wheel) not in HELD_OUT and not done_stdlib:
            done_stdlib = True
            root = Path(sysconfig.get_paths()["stdlib"])
            for path in sorted(root.rglob("*.py")):
                inside = path.relative_to(root).as_posix()
                if not re.search(r"site-packages|lib2to3|idlelib|encodings", inside):
                    yield "python", inside, path.read_bytes().decode("utf-8", "replace")
        with zipfile.ZipFile(wheel) as z:
            for inside in sorted(n for n in z.namelist() if n.endswith(".py")):
                yield name_of(wheel), inside, z.read(inside).decode("utf-8", "replace")


def name_of(wheel: Path) -> str:
    return wheel.name.split("-")[0].lower().replace("_", "-")


class Seen:
    """Near duplicates by containment: a file most of whose three-line shingles came before is one."""

    def __init__(self, share: float = 0.5) -> None:
        self.share, self.shingles = share, set()

    def duplicate(self, text: str) -> bool:
        lines = [" ".join(line.split()) for line in text.split("\n")]
        lines = [line for line in lines if len(line) > 3]
        mine = {hash("\n".join(lines[i : i + 3])) for i in range(max(1, len(lines) - 2))}
        if len(mine & self.shingles) > self.share * len(mine):
            return True
        self.shingles |= mine
        return False


def collect(wheels: Path, out: Path) -> None:
    """Write train.jsonl and held.jsonl, one document a line, and corpus.json with the counts."""
    seen, counts, size = Seen(), Counter(), Counter()
    with open(out / "train.part", "w") as train, open(out / "held.part", "w") as held:
        for package, path, text in sources(wheels):
            counts["files"] += 1
            if SKIPPED_PARTS.search(path):
                counts["skipped by path"] += 1
            elif size[package] > MAX_PACKAGE:
                counts["package full"] += 1
            elif (text := cleaned(text)) is None:
                counts["not hand-written source"] += 1
            elif seen.duplicate(text):
                counts["near duplicate"] += 1
            else:
                counts["kept"] += 1
                size[package] += len(text)
                file = held if package in HELD_OUT else train
                file.write(json.dumps({"package": package, "path": path, "text": text}) + "\n")
    summary = {"files": counts, "characters": dict(size.most_common())}
    (out / "corpus.json").write_text(json.dumps(summary, indent=1) + "\n")
    (out / "held.part").rename(out / "held.jsonl")
    (out / "train.part").rename(out / "train.jsonl")


def documents(file: Path) -> Iterator[str]:
    with open(file) as f:
        for line in f:
            yield json.loads(line)["text"]


def train_tokenizer(out: Path) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    share = min(
        1.0, TOKENIZER_SAMPLE / sum(json.loads((out / "corpus.json").read_text())["characters"].values())
    )
    chosen = random.Random(0)
    tokenizer.train_from_iterator(
        (t for t in documents(out / "train.jsonl") if chosen.random() < share), trainer
    )
    tokenizer.save(str(out / "tokenizer.json"))


def encode(out: Path, name: str) -> None:
    """name.npy: uint16, every document followed by token 0, documents in a random order."""
    tokenizer = Tokenizer.from_file(str(out / "tokenizer.json"))
    tokenizer.encode_special_tokens = True  # a document that spells one out is text
    arrays, batch = [], []
    for text in documents(out / f"{name}.jsonl"):
        batch.append(text)
        if len(batch) == 256:
            arrays += [np.array([*e.ids, 0], np.uint16) for e in tokenizer.encode_batch(batch)]
            batch = []
    arrays += [np.array([*e.ids, 0], np.uint16) for e in tokenizer.encode_batch(batch)]
    random.Random(1).shuffle(arrays)
    np.save(out / f"{name}.npy", np.concatenate(arrays))


def pack(job: tuple[Path, int]) -> str:
    out, part = job
    tokens = np.load(out / "train.npy", mmap_mode="r")[part * PART_TOKENS : (part + 1) * PART_TOKENS]
    file = out / "packed" / f"train.{part}.xz"
    if not file.exists():
        file.with_suffix(".part").write_bytes(lzma.compress(tokens.tobytes(), preset=6))
        file.with_suffix(".part").rename(file)
    return f"{file.name}: {len(tokens)} tokens, {file.stat().st_size / 1e6:.1f} MB"


def main() -> None:
    wheels, out = Path(sys.argv[1]), Path(sys.argv[2])
    (out / "packed").mkdir(parents=True, exist_ok=True)
    stages = [
        ("train.jsonl", lambda: collect(wheels, out)),
        ("tokenizer.json", lambda: train_tokenizer(out)),
        ("held.npy", lambda: encode(out, "held")),
        ("train.npy", lambda: encode(out, "train")),
    ]
    for file, make in stages:
        if not (out / file).exists():
            print("making", file, flush=True)
            make()
    held, n = np.load(out / "held.npy"), len(np.load(out / "train.npy", mmap_mode="r"))
    (out / "packed" / "held.xz").write_bytes(lzma.compress(held.tobytes(), preset=6))
    (out / "packed" / "tokenizer.json").write_bytes((out / "tokenizer.json").read_bytes())
    characters = json.loads((out / "corpus.json").read_text())["characters"]
    held_bytes = sum(len(text.encode()) for text in documents(out / "held.jsonl"))
    facts = {
        "train_tokens": n,
        "held_tokens": len(held),
        "held_bytes_per_token": held_bytes / len(held),
        "packages": len(characters),
        "held_out": sorted(HELD_OUT),
        "tokenizer_sha256": hashlib.sha256((out / "tokenizer.json").read_bytes()).hexdigest(),
    }
    (out / "packed" / "facts.json").write_text(json.dumps(facts, indent=1) + "\n")
    with ProcessPoolExecutor(2) as pool:
        for line in pool.map(pack, [(out, i) for i in range(-(-n // PART_TOKENS))]):
            print(line, flush=True)


if __name__ == "__main__":
    main()
