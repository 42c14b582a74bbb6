"""A job's certificate authority and the certificates of its workers, as files.

    DIR/authority.pem       every worker gets it
    DIR/authority.key       signs certificates: keep it apart from the workers
    DIR/workers/NAME.pem    this worker's certificate
    DIR/workers/NAME.key    and its key: only this worker gets it

Elliptic curve keys (P-256), read by their owner alone. Needs the library `cryptography`.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import cast, final

from gradwire.agent.peers.directory import check_name
from gradwire.errors import UsageError
from gradwire.options import Tls
from gradwire.transport.tls_session import URI_PREFIX

try:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
except ImportError as missing:
    raise UsageError(
        "to make certificates, gradwire needs the library cryptography",
        hint="pip install 'gradwire[certs]'",
    ) from missing

_AUTHORITY_DAYS = 3650
_CLOCKS_DIFFER = timedelta(minutes=5)
_LONGEST_COMMON_NAME = 64
_PEM = serialization.Encoding.PEM


@final
class Folder:
    """The folder with the certificates and keys of one job, and the paths in it."""

    def __init__(self, path: Path) -> None:
        self.authority, self.authority_key = path / "authority.pem", path / "authority.key"
        self._workers = path / "workers"

    def certificate(self, worker: str) -> Path:
        """The file with the certificate of one worker."""
        return self._workers / f"{worker}.pem"

    def key(self, worker: str) -> Path:
        """The file with the key of one worker."""
        return self._workers / f"{worker}.key"

    def tls(self, worker: str) -> Tls:
        """The value of `Options.tls` for this worker."""
        certificate, key = self.certificate(worker), self.key(worker)
        return Tls(certificate=str(certificate), key=str(key), authority=str(self.authority))


@final
class Authority:
    """The certificate authority that all workers of a job trust."""

    def __init__(self, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> None:
        self.certificate, self._key = certificate, key

    @classmethod
    def new(cls) -> Authority:
        """Create an authority with a new key."""
        key = ec.generate_private_key(ec.SECP256R1())
        name = f"authority {secrets.token_hex(4)} of a gradwire job"
        builder = _builder(name, key.public_key(), timedelta(days=_AUTHORITY_DAYS), signer=None)
        return cls(builder.sign(key, hashes.SHA256()), key)

    @classmethod
    def read(cls, certificate: Path, key: Path) -> Authority:
        """Read an authority from its files."""
        try:
            shown = x509.load_pem_x509_certificate(certificate.read_bytes())
            secret = serialization.load_pem_private_key(key.read_bytes(), password=None)
        except (OSError, ValueError, TypeError) as error:
            raise UsageError(
                f"cannot read the authority {certificate} with its key {key}: {error}",
                hint="bring its key back for this, or make a new authority in an empty folder",
            ) from error
        is_ours = isinstance(secret, ec.EllipticCurvePrivateKey)
        if not is_ours or secret.public_key() != shown.public_key():
            raise UsageError(f"{key} is not the key of {certificate}")
        return cls(shown, cast(ec.EllipticCurvePrivateKey, secret))

    def write(self, folder: Folder) -> None:
        """Write certificate and key into a folder that has none yet."""
        _write_pair(folder.authority, self.certificate, self._key)

    def enrol(
        self,
        folder: Folder,
        worker: str,
        lasts: timedelta,
        *,
        renew: bool = False,
        names: Sequence[str] = (),
    ) -> None:
        """Write a new key and certificate of one worker, or of a worker of any of these `names`."""
        names = names or [worker]
        key = ec.generate_private_key(ec.SECP256R1())
        both = [ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH]
        uris = [x509.UniformResourceIdentifier(URI_PREFIX + name) for name in names]
        signed = (
            _builder(names[0][:_LONGEST_COMMON_NAME], key.public_key(), lasts, signer=self)
            .add_extension(x509.ExtendedKeyUsage(both), critical=False)
            .add_extension(x509.SubjectAlternativeName(uris), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        _write_pair(folder.certificate(worker), signed, key, replace=renew)


def make(
    folder: Folder,
    workers: Sequence[str],
    *,
    days: float = 30,
    renew: bool = False,
    authority_key: Path | None = None,
) -> None:
    """Make the certificates of these workers, and the authority if the folder has none."""
    if not days > 0:
        raise UsageError(f"a certificate for {days} days would never be valid")
    for worker in workers:
        check_name(worker)
        place = folder.certificate(worker)
        if place.exists() and not renew:
            raise UsageError(f"{place} is there already", hint="--renew replaces it and its key")
    if folder.authority.exists():
        authority = Authority.read(folder.authority, authority_key or folder.authority_key)
    else:
        authority = Authority.new()
        authority.write(folder)
    for worker in workers:
        authority.enrol(folder, worker, timedelta(days=days), renew=renew)


def _builder(
    name: str, public: ec.EllipticCurvePublicKey, lasts: timedelta, signer: Authority | None
) -> x509.CertificateBuilder:
    """A certificate to be signed by `signer`; one of an authority, by itself, without it."""
    now, is_authority = datetime.now(UTC), signer is None
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    usage = x509.KeyUsage(
        digital_signature=not is_authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=is_authority,
        crl_sign=is_authority,
        encipher_only=False,
        decipher_only=False,
    )
    constraints = x509.BasicConstraints(is_authority, path_length=0 if is_authority else None)
    own = x509.SubjectKeyIdentifier.from_public_key(public)
    signing = signer._key.public_key() if signer else public
    theirs = x509.AuthorityKeyIdentifier.from_issuer_public_key(signing)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(signer.certificate.subject if signer else subject)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now + min(lasts, timedelta()) - _CLOCKS_DIFFER)
        .not_valid_after(now + lasts)
        .add_extension(usage, critical=True)
        .add_extension(constraints, critical=True)
        .add_extension(own, critical=False)
        .add_extension(theirs, critical=False)
    )


def _write_pair(
    path: Path, shown: x509.Certificate, key: ec.EllipticCurvePrivateKey, *, replace: bool = False
) -> None:
    pkcs8, plain = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    secret = key.private_bytes(_PEM, pkcs8, plain)
    _write(path.with_suffix(".key"), secret, 0o600, replace=replace)
    _write(path, shown.public_bytes(_PEM), 0o644, replace=replace)


def _write(path: Path, data: bytes, mode: int, *, replace: bool) -> None:
    """Write a file atomically with its mode; an existing one is kept unless `replace`."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(data)
        if replace:
            draft.replace(path)
        else:
            os.link(draft, path)
    except FileExistsError:
        raise UsageError(f"{path} is there already", hint="choose an empty folder") from None
    finally:
        draft.unlink(missing_ok=True)
