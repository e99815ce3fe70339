"""Step 1: fetch the wheels that packages.txt pins and check their licences: `python 01_fetch.py WHEELS`.

Only wheels are taken, so nothing of a package is ever run. Each licence is read from the wheel's own metadata; a package
without a permissive one is refused. Writes WHEELS/licences.json. Run again, it fetches what is missing.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from email.parser import Parser
from pathlib import Path

PACKAGES = Path(__file__).with_name("packages.txt")
LINUX = ("manylinux_2_17_x86_64", "manylinux2014_x86_64", "manylinux_2_27_x86_64", "manylinux_2_28_x86_64")
MAC = ("macosx_11_0_arm64", "macosx_12_0_arm64", "macosx_14_0_arm64")
BIG_ON_LINUX = {"torch", "ray"}  # the same Python source without gigabytes of binaries
PYTHONS = ("3.12", "3.14.2", "3.11")
PERMISSIVE = re.compile(
    r"\b(MIT|BSD|Apache|PSF|Python Software Foundation|ISC|0BSD|HPND|Unlicense)\b", re.IGNORECASE
)
COPYLEFT = re.compile(r"\b(A?GPL|LGPL|General Public|EUPL|CeCILL|MPL|Mozilla)", re.IGNORECASE)


def pins() -> list[tuple[str, str]]:
    """(name, version) of every package, in the order of the file."""
    lines = (line.split("#")[0].strip() for line in PACKAGES.read_text().splitlines())
    return [tuple(line.split("==")) for line in lines if line]


def wheel_of(folder: Path, name: str, version: str) -> Path | None:
    key = re.sub(r"[-_.]+", "_", name).lower()
    for path in folder.glob("*.whl"):
        stem = path.name.split("-")
        if re.sub(r"[-_.]+", "_", stem[0]).lower() == key and stem[1] == version:
            return path
    return None


def fetch(folder: Path, name: str, version: str) -> Path:
    """The wheel, downloaded if need be. Raises RuntimeError with pip's last line if there is none."""
    found = wheel_of(folder, name, version)
    if found:
        return found
    said = ""
    for python in PYTHONS:
        tag = "cp3" + python.split(".")[1]
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:"]
        command += ["--python-version", python, "--implementation", "cp", "-d", str(folder)]
        command += [f"--abi={abi}" for abi in (tag, "abi3", "none")]
        command += [f"--platform={p}" for p in (MAC if name in BIG_ON_LINUX else LINUX)]
        ran = subprocess.run([*command, f"{name}=={version}"], check=False, capture_output=True, text=True)
        if ran.returncode == 0 and (found := wheel_of(folder, name, version)):
            return found
        said = (ran.stderr.strip().splitlines() or ["nothing"])[-1]
    raise RuntimeError(f"{name}=={version}: no wheel; pip said: {said}")


def licence(wheel: Path) -> str:
    """The licence as the metadata states it: expression, else classifiers, else the first line of the field."""
    with zipfile.ZipFile(wheel) as z:
        inside = next(n for n in z.namelist() if n.endswith(".dist-info/METADATA"))
        meta = Parser().parsestr(z.read(inside).decode("utf-8", "replace"), headersonly=True)
    named = [c.split("::")[-1].strip() for c in meta.get_all("Classifier", []) if c.startswith("License ::")]
    field = (meta.get("License") or "").strip().splitlines()
    return (
        meta.get("License-Expression")
        or ", ".join(n for n in named if n != "OSI Approved")
        or (field or [""])[0]
    )


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(4) as pool:
        wheels = list(pool.map(lambda pin: fetch(folder, *pin), pins()))
    found = {f"{name}=={version}": licence(w) for (name, version), w in zip(pins(), wheels, strict=True)}
    (folder / "licences.json").write_text(json.dumps(found, indent=1) + "\n")
    wrong = {k: v for k, v in found.items() if not PERMISSIVE.search(v) or COPYLEFT.search(v)}
    if wrong:
        sys.exit(f"not permissive, or not said to be: {json.dumps(wrong, indent=1)}")
    print(f"{len(found)} packages, {sum(w.stat().st_size for w in wheels) / 1e6:.0f} MB, all permissive")


if __name__ == "__main__":
    main()
