"""Reads the certificates that this process shows to etcd, and says what a member would refuse them for.

A member closes the connection in the same way for a certificate that is expired, not valid yet, of an unknown
authority or not meant for clients, and tells the reason to its own log alone. So it is looked at here. The clock is
this host's: a wrong one is a frequent cause, and is therefore in the sentence.
"""

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import grpc
from cryptography import exceptions, x509
from cryptography.hazmat.primitives import serialization
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from crust.cluster.etcd.client import failures

WARN_BEFORE = timedelta(days=14)
"""An open connection outlives its certificate, so nothing fails until the next one: the date must warn."""

KEY_DIFFERS = "the private key is not that of the certificate"
_SEE = "docs/etcd.md, Certificates"


@dataclass(frozen=True, slots=True)
class Files:
    """Where the PEM files are."""

    ca: str
    cert: str
    key: str


@dataclass(frozen=True, slots=True)
class Identity:
    """The content of the files, as they were read together, and what was found in them."""

    ca: bytes
    cert: bytes
    key: bytes
    user: str
    """The common name, which is the user's name in etcd."""
    not_before: datetime
    not_after: datetime
    flaws: tuple[str, ...]
    """What a member may refuse it for at any time: user, purpose, key, issuer. A member's authorities may be
    others.
    """

    def credentials(self) -> grpc.ChannelCredentials:
        """For a channel. gRPC never reads a file again."""
        return grpc.ssl_channel_credentials(self.ca, self.key, self.cert)

    def problems(self, now: datetime) -> tuple[str, ...]:
        """Why a member refuses it at `now`; empty if nothing is seen."""
        return (*self.flaws, *self.out_of_date(now))

    def out_of_date(self, now: datetime) -> tuple[str, ...]:
        """Why no member takes a new connection with it at `now`; empty if its dates are right."""
        found = []
        if now >= self.not_after:
            found.append(
                f"the certificate expired {_at(self.not_after)}, and it is {_at(now)} here"
            )
        if now < self.not_before:
            found.append(
                f"the certificate is valid from {_at(self.not_before)}, and it is {_at(now)} here"
            )
        return tuple(found)

    def expires_soon(self, now: datetime) -> bool:
        """Whether somebody must act."""
        return now > self.not_after - WARN_BEFORE


def read(files: Files) -> Identity:
    """Read and examine the files. Blocks. Raises `StoreCertificateRefused` if one is not what it must be."""
    try:
        ca, cert, key = (Path(path).read_bytes() for path in (files.ca, files.cert, files.key))
    except OSError as err:
        why = f"{err.filename}: {err.strerror}"
        raise failures.StoreCertificateRefused(
            "the certificates cannot be read", why, _SEE
        ) from err
    chain = _certificates(files.cert, cert)
    authorities = _certificates(files.ca, ca)
    leaf = chain[0]
    return Identity(
        ca, cert, key,
        user=_common_name(leaf),
        not_before=leaf.not_valid_before_utc,
        not_after=leaf.not_valid_after_utc,
        flaws=tuple(_flaws(chain, authorities, _public_key(files.key, key))),
    )  # fmt: skip


def now() -> datetime:
    """By this host's clock."""
    return datetime.now(UTC)


def _flaws(
    chain: list[x509.Certificate], authorities: list[x509.Certificate], public_key: bytes
) -> list[str]:
    leaf = chain[0]
    found = []
    if not _common_name(leaf):
        found.append("it has no common name, which is the user's name in etcd")
    if not _is_for_clients(leaf):
        found.append("its extended key usage is not clientAuth")
    if _encoded(leaf.public_key()) != public_key:
        found.append(KEY_DIFFERS)
    if not any(_issued(last, each) for last in chain for each in authorities):
        found.append("it is not signed by an authority of cluster.ca")
    return found


def _is_for_clients(leaf: x509.Certificate) -> bool:
    try:
        usage = leaf.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    except x509.ExtensionNotFound:
        return True  # for any purpose
    return bool(
        {ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.ANY_EXTENDED_KEY_USAGE} & set(usage)
    )


def _issued(certificate: x509.Certificate, authority: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(authority)
    except (ValueError, TypeError, exceptions.InvalidSignature):
        return False
    return True


def _common_name(leaf: x509.Certificate) -> str:
    names = leaf.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    return str(names[0].value) if names else ""


def _certificates(path: str, pem: bytes) -> list[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(pem)
    except ValueError as err:
        why = f"{path} has no certificate in PEM"
        raise failures.StoreCertificateRefused(
            "the certificates cannot be read", why, _SEE
        ) from err


def _public_key(path: str, pem: bytes) -> bytes:
    try:
        return _encoded(serialization.load_pem_private_key(pem, password=None).public_key())
    except (ValueError, TypeError, exceptions.UnsupportedAlgorithm):
        # Without its cause: a parser's text may quote what it read.
        why = f"{path} has no private key in PEM, or one with a passphrase"
        raise failures.StoreCertificateRefused(
            "the private key cannot be read", why, _SEE
        ) from None


def _encoded(key: object) -> bytes:
    encode = key.public_bytes  # type: ignore[attr-defined]  # every kind of public key has it
    return bytes(
        encode(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    )


def _at(moment: datetime) -> str:
    return moment.strftime("%Y-%m-%d %H:%M:%S UTC")
