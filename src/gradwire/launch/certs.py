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
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, final

from gradwire.agent.peers.directory import check_name
from gradwire.errors import UsageError
from gradwire.options import Tls
from gradwire.transport.tls.identity import URI_PREFIX

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

if TYPE_CHECKING:
    from cryptography.x509 import Certificate, CertificateBuilder, ExtensionType

_AUTHORITY_DAYS = 3650
_CLOCKS_DIFFER = timedelta(minutes=5)
_LONGEST_COMMON_NAME = 64


@dataclass(frozen=True, slots=True)
class Folder:
    """The folder with the certificates and keys of one job."""

    path: Path

    @property
    def authority(self) -> Path:
        """The certificate of the authority."""
        return self.path / "authority.pem"

    @property
    def authority_key(self) -> Path:
        """The key that signs."""
        return self.path / "authority.key"

    def certificate(self, worker: str) -> Path:
        """Of one worker."""
        return self.path / "workers" / f"{worker}.pem"

    def key(self, worker: str) -> Path:
        """Of one worker."""
        return self.path / "workers" / f"{worker}.key"

    def tls(self, worker: str) -> Tls:
        """The value of `Options.tls` for this worker."""
        return Tls(
            certificate=str(self.certificate(worker)),
            key=str(self.key(worker)),
            authority=str(self.authority),
        )


@final
class Authority:
    """The certificate authority that all workers of a job trust."""

    def __init__(self, certificate: Certificate, key: ec.EllipticCurvePrivateKey) -> None:
        self.certificate, self._key = certificate, key

    @classmethod
    def new(cls) -> Authority:
        """Create an authority with a new key."""
        key = _new_key()
        name = _named(f"authority {secrets.token_hex(4)} of a gradwire job")
        usage = _usage(key_cert_sign=True, crl_sign=True)
        builder = _builder(name, name, key.public_key(), timedelta(days=_AUTHORITY_DAYS), usage)
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), True)
        builder = _keyed(builder, key.public_key(), key.public_key())
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
        is_pair = isinstance(secret, ec.EllipticCurvePrivateKey)
        if not is_pair or secret.public_key() != shown.public_key():
            raise UsageError(f"{key} is not the key of {certificate}")
        assert isinstance(secret, ec.EllipticCurvePrivateKey)
        return cls(shown, secret)

    def write(self, folder: Folder) -> None:
        """Write certificate and key into a folder that has none yet."""
        _write_key(folder.authority_key, self._key)
        _write(folder.authority, _pem_of(self.certificate), 0o644)

    def sign(
        self, names: Sequence[str], public: ec.EllipticCurvePublicKey, lasts: timedelta
    ) -> Certificate:
        """Sign a certificate that lets the owner of the key be a worker of these names."""
        for name in names:
            check_name(name)
        usage = _usage(digital_signature=True)
        subject = _named(names[0][:_LONGEST_COMMON_NAME])
        builder = _builder(subject, self.certificate.subject, public, lasts, usage)
        signer = self._key.public_key()
        both = [ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH]
        uris = [x509.UniformResourceIdentifier(URI_PREFIX + name) for name in names]
        added: list[tuple[ExtensionType, bool]] = [
            (x509.BasicConstraints(ca=False, path_length=None), True),
            (x509.ExtendedKeyUsage(both), False),
            (x509.SubjectAlternativeName(uris), False),
        ]
        for extension, is_critical in added:
            builder = builder.add_extension(extension, is_critical)
        return _keyed(builder, public, signer).sign(self._key, hashes.SHA256())

    def enrol(
        self,
        folder: Folder,
        worker: str,
        lasts: timedelta,
        *,
        renew: bool = False,
        names: Sequence[str] | None = None,
    ) -> None:
        """Write a new key and certificate of one worker; `names` replaces its name in them."""
        check_name(worker)
        place = folder.certificate(worker)
        _check_free(place, renew=renew)
        key = _new_key()
        _write_key(folder.key(worker), key, replace=renew)
        signed = self.sign(names or [worker], key.public_key(), lasts)
        _write(place, _pem_of(signed), 0o644, replace=renew)


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
        _check_free(folder.certificate(worker), renew=renew)
    if folder.authority.exists():
        authority = Authority.read(folder.authority, authority_key or folder.authority_key)
    else:
        authority = Authority.new()
        authority.write(folder)
    for worker in workers:
        authority.enrol(folder, worker, timedelta(days=days), renew=renew)


def _check_free(place: Path, *, renew: bool) -> None:
    if place.exists() and not renew:
        raise UsageError(f"{place} is there already", hint="--renew replaces it and its key")


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    public: ec.EllipticCurvePublicKey,
    lasts: timedelta,
    usage: x509.KeyUsage,
) -> CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now + min(lasts, timedelta()) - _CLOCKS_DIFFER)
        .not_valid_after(now + lasts)
        .add_extension(usage, critical=True)
    )


def _keyed(
    builder: CertificateBuilder,
    public: ec.EllipticCurvePublicKey,
    signer: ec.EllipticCurvePublicKey,
) -> CertificateBuilder:
    """Add the identifiers of the certified key and of the signing key."""
    own = x509.SubjectKeyIdentifier.from_public_key(public)
    issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(signer)
    return builder.add_extension(own, False).add_extension(issuer, False)


def _usage(**granted: bool) -> x509.KeyUsage:
    nothing = dict.fromkeys(
        (
            "digital_signature",
            "content_commitment",
            "key_encipherment",
            "data_encipherment",
            "key_agreement",
            "key_cert_sign",
            "crl_sign",
            "encipher_only",
            "decipher_only",
        ),
        False,
    )
    return x509.KeyUsage(**(nothing | granted))


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _new_key() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP256R1())


def _pem_of(certificate: Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _write_key(path: Path, key: ec.EllipticCurvePrivateKey, *, replace: bool = False) -> None:
    plain = serialization.NoEncryption()
    pem, pkcs8 = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    _write(path, key.private_bytes(pem, pkcs8, plain), 0o600, replace=replace)


def _write(path: Path, data: bytes, mode: int, *, replace: bool = False) -> None:
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
