"""Make releases of trained models, and check that the change of any byte of them is found.

`python scripts/check_tampering.py DATA [CHECKPOINT …]` makes a signed release of each checkpoint (MiniLM, where none is
named) in fp32 and int8, with DATA as its test collection, and prints a row of a Markdown table for each: what
`onnxtool release --check`, the validator of CycloneDX and `model_signing verify` say of it, and in how many of --times
a single byte of a file that was changed is found, in every kind of file in turn.

Exit code 1: a release does not pass, or a change is not found.
"""

from __future__ import annotations

import argparse
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from harness.machine import cpu_class
from make_models import trained_model

from onnxtool.release import check_release, make_release, read_config

CONFIG = """
checkpoint = {checkpoint!r}
output = "release"
name = "model"
precisions = ["fp32", "int8"]
targets = ["sentence-transformers"]
data = {data!r}
key = "release.key"
[evaluate]
fail_if = ["ndcg@10<-1%"]
"""


def write_keys(folder: Path) -> Path:
    """Write a private key, and return the path of its public key."""
    key = ec.generate_private_key(ec.SECP256R1())
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    (folder / "release.key").write_bytes(private)
    public = folder / "release.pub"
    public.write_bytes(
        key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    )
    return public


def count_found(release: Path, public: Path, times: int) -> int:
    """Change one byte of a file `times` times, each file in turn, and return how often the check fails."""
    chance = random.Random(0)  # noqa: S311  no secret
    paths = sorted(path for path in release.rglob("*") if path.is_file())
    found = 0
    for number in range(times):
        path = paths[number % len(paths)]
        place, change = chance.randrange(path.stat().st_size), chance.randrange(1, 256)
        with path.open("r+b") as file:
            file.seek(place)
            (before,) = file.read(1)
            file.seek(place)
            file.write(bytes([before ^ change]))
            file.flush()
            is_found = not check_release(release, public_key=public).passed
            file.seek(place)
            file.write(bytes([before]))
        found += is_found
        if not is_found:
            print(f"not found: {path.relative_to(release)}, byte {place}", file=sys.stderr)
    return found


def check(checkpoint: Path, data: Path, times: int) -> bool:
    """Print the row of a checkpoint, and return whether everything is as it should be."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = folder / "release.toml"
        config.write_text(CONFIG.format(checkpoint=str(checkpoint.resolve()), data=str(data.resolve())))
        public, release = write_keys(folder), folder / "release"
        seconds = []
        for _ in range(2):
            start = time.perf_counter()
            report = make_release(read_config(config), force=True)
            seconds.append(time.perf_counter() - start)
        again = sum(step.state == "ran" for step in report.steps)
        passed = check_release(release, public_key=public).passed
        is_valid = JsonStrictValidator(SchemaVersion.V1_6).validate_str((release / "bom.cdx.json").read_text()) is None
        verify = [sys.executable, "-m", "model_signing", "verify", "key", str(release)]
        verify += ["--signature", str(release / "model.sig"), "--public_key", str(public)]
        is_signed = subprocess.run(verify, capture_output=True, check=False).returncode == 0
        found = count_found(release, public, times)
        still = check_release(release, public_key=public).passed
        shutil.rmtree(release)
    said = " | ".join("passes" if one else "**fails**" for one in (passed and still, is_valid, is_signed))
    size = f"{report.num_files} files, {report.size_bytes / 1e6:.0f} MB"
    times_taken = f"{seconds[0]:.0f} s | {seconds[1]:.1f} s, {again} steps"
    print(f"| {checkpoint.name} | {size} | {times_taken} | {said} | {found} of {times} |", flush=True)
    return passed and still and is_valid and is_signed and found == times and not again


def main() -> int:
    """Run the script."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("data", type=Path, help="a test collection")
    parser.add_argument("checkpoints", type=Path, nargs="*", metavar="CHECKPOINT")
    parser.add_argument("--times", type=int, default=100, help="bytes that are changed")
    asked = parser.parse_args()
    print(f"{cpu_class()}\n")
    print(
        "| checkpoint | release | made in | made again in | `--check` | CycloneDX | `model_signing` | changes found |"
    )
    print("|---|---:|---:|---:|---|---|---|---:|", flush=True)
    right = [check(checkpoint, asked.data, asked.times) for checkpoint in asked.checkpoints or [trained_model()]]
    return int(not all(right))


if __name__ == "__main__":
    raise SystemExit(main())
