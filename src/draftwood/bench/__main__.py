"""`python -m draftwood.bench`: the same commands as `draftwood bench`."""

from draftwood.bench.cli import app

if __name__ == "__main__":
    app(prog_name="draftwood bench")
