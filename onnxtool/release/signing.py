"""The signature of a release: OpenSSF model signing through model-signing, with a key or a Sigstore identity.

The signature lies in the folder and contains the digest of every other file; `model_signing verify` accepts it.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

from onnxtool.errors import InputError, imported
from onnxtool.interruption import temporary_folder
from onnxtool.model_file import write_text
from onnxtool.reading import parse_json, read_bytes, read_text

SIGNATURE_NAME = "model.sig"

_MEDIA_TYPE = "application/vnd.dev.sigstore.bundle.v0.3+json"
_PAYLOAD_TYPE = "application/vnd.in-toto+json"
_DIGESTS = re.compile(r": Expected \W*Digest\(.*")  # of model-signing's messages, as Python writes bytes
_MAKE_KEY = "make one: openssl ecparam -name prime256v1 -genkey -noout -out release.key"
_MAKE_PUBLIC = "make it from the private key: openssl ec -in release.key -pubout -out release.pub"
# Errors that cryptography and model-signing raise for bad keys, tokens and signatures besides their own.
_FAILURES = (ValueError, TypeError, LookupError, AttributeError, RecursionError)


def sign(folder: Path, key: Path | None = None, *, password: str = "", identity_token: str = "") -> None:
    """Sign all files in `folder` except for an existing signature, which is replaced.

    Args:
        folder: of the release.
        key: an elliptic-curve private key (P-256, P-384 or P-521), as PEM.
        password: the key's password, if it has one.
        identity_token: an OpenID Connect token, for a Sigstore signature instead of a key; needs the network.

    Raises:
        InputError: neither a key nor a token is given, they cannot be used, the folder has a symbolic link, or
            model-signing is not installed.
        OutputWriteError: the signature cannot be written.
    """
    library = require_library()
    if (key is None) == (not identity_token):
        raise InputError("a release is signed with a private key or with an identity token", "pass one of the two")
    config = library.signing.Config()
    hashing = library.hashing.Config().set_ignored_paths(paths=[SIGNATURE_NAME])
    with temporary_folder() as temporary:
        signature = temporary / SIGNATURE_NAME
        if key is None:
            with _refused("the identity token cannot be used", "get a new one: it is valid for minutes"):
                config.use_sigstore_signer(identity_token=identity_token)
        else:
            with _refused(f"{key} is no private key to sign with", _MAKE_KEY):
                config.use_elliptic_key_signer(private_key=key, password=password.encode() if password else None)
        with _refused(f"cannot sign {folder}", "a release has regular files alone"):
            config.set_hashing_config(hashing).sign(folder, signature)
        text = signature.read_text(encoding="utf-8")
    write_text(folder / SIGNATURE_NAME, text, force=True)


def fingerprint(key: Path, password: str) -> str:
    """Return the SHA-256 of the public key of a private key.

    Raises:
        InputError: it is not one to sign with, or model-signing is not installed.
    """
    config, secret = require_library().signing.Config(), password.encode() or None
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key

    with _refused(f"{key} is no private key to sign with", _MAKE_KEY):
        config.use_elliptic_key_signer(private_key=key, password=secret)
        public = load_pem_private_key(read_bytes(key), secret).public_key()
    return sha256(public.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)).hexdigest()


def verify_signature(folder: Path, public_key: Path | None = None, *, identity: str = "", issuer: str = "") -> None:
    """Verify that the folder has exactly the signed files.

    Args:
        folder: of the release.
        public_key: the signer's public key, as PEM; None for a Sigstore signature.
        identity: Sigstore identity of the signer, e.g. an email address.
        issuer: OpenID Connect issuer of the identity.

    Raises:
        InputError: the key cannot be read, there is no signature, a file differs from the signed one, the signature is
            by another key, or model-signing is not installed.
    """
    library = require_library()
    config = library.verifying.Config()
    if public_key is None:
        if not identity or not issuer:
            raise InputError(
                "a signature is verified with a public key, or with an identity and its issuer", "pass one of the two"
            )
        with _refused("Sigstore cannot be used", "it needs the network"):
            config.use_sigstore_verifier(identity=identity, oidc_issuer=issuer)
    else:
        with _refused(f"{public_key} is no public key to verify with", _MAKE_PUBLIC):
            config.use_elliptic_key_verifier(public_key=public_key)
    path = folder / SIGNATURE_NAME
    with _refused(f"the signature of {folder} does not hold", "the folder or the signature was changed since"):
        if not path.is_file():
            raise ValueError(f"there is no {SIGNATURE_NAME}")
        _require_canonical(path, has_key=public_key is not None)
        config.verify(folder, path)


def require_library() -> Any:
    """Return the module of model-signing.

    Raises:
        InputError: it is not installed.
    """
    return imported("model_signing", "a signature needs model-signing", "pip install 'onnxtool-cli[release]'")


def _require_canonical(path: Path, *, has_key: bool) -> None:
    """Refuse a signature in another form than model-signing writes: parts that it ignores could be changed.

    Raises:
        ValueError: it has other whitespace, keys or base64 spellings.
    """
    text = read_text(path)
    bundle = parse_json(text)
    if json.dumps(bundle, separators=(",", ":"), ensure_ascii=False) != text:
        raise ValueError("it was edited")
    if not has_key:
        return
    envelope = bundle["dsseEnvelope"]
    payload, signature = envelope["payload"], envelope["signatures"][0]["sig"]
    expected = {
        "mediaType": _MEDIA_TYPE,
        "verificationMaterial": {
            "publicKey": {"hint": str(bundle["verificationMaterial"]["publicKey"]["hint"])},
            "tlogEntries": [],
        },
        "dsseEnvelope": {
            "payload": base64.b64encode(base64.b64decode(payload, validate=True)).decode(),
            "payloadType": _PAYLOAD_TYPE,
            "signatures": [{"sig": base64.b64encode(base64.b64decode(signature, validate=True)).decode(), "keyid": ""}],
        },
    }
    if bundle != expected:
        raise ValueError("it has other entries than model-signing writes")


@contextmanager
def _refused(problem: str, hint: str) -> Iterator[None]:
    """Convert errors of keys and signatures to ours."""
    from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
    from sigstore.errors import Error as SigstoreError

    try:
        yield
    except OSError as error:
        raise InputError(f"{problem}: {error.strerror or error}", hint) from error
    except InvalidSignature as error:
        raise InputError(f"{problem}: it is not one by this key", hint) from error
    except (*_FAILURES, UnsupportedAlgorithm, SigstoreError) as error:
        reason = _DIGESTS.sub("", " ".join(str(error).split())) or type(error).__name__
        raise InputError(f"{problem}: {reason[:300]}", hint) from error
