"""An authority that signs certificates for etcd and its users, quickly and with any flaw that a test asks for."""

import datetime
import ipaddress
from dataclasses import dataclass
from datetime import UTC, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from crust.cluster.etcd.client.certificates import Files

DAY = timedelta(days=1)


@dataclass(frozen=True, slots=True)
class Pair:
    """A certificate and its key, in PEM."""

    cert: bytes
    key: bytes


class Authority:
    """A CA with a key of its own. Certificates and keys are written to `directory`."""

    def __init__(self, directory: Path, name: str = "ca", host: str = "127.0.0.1") -> None:
        """Certificates of servers are for the address `host`."""
        self._directory = directory
        self._host = host
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"crust {name}")])
        self.ca = directory / f"{name}.crt"
        self.ca.write_bytes(
            _pem(self._sign(self._name, self._key.public_key(), -DAY, 30 * DAY, is_ca=True))
        )

    def issue(
        self,
        user: str,
        *,
        begins: timedelta = -DAY,
        ends: timedelta = 30 * DAY,
        is_server: bool = False,
        has_usage: bool = True,
    ) -> Pair:
        """Sign a certificate; its validity is relative to now. A server's is for its address and for clients too."""
        key = ec.generate_private_key(ec.SECP256R1())
        names = [x509.NameAttribute(NameOID.COMMON_NAME, user)] if user else []
        usages = [ExtendedKeyUsageOID.SERVER_AUTH] if is_server or not has_usage else []
        usages += [ExtendedKeyUsageOID.CLIENT_AUTH] if has_usage else []
        signed = self._sign(x509.Name(names), key.public_key(), begins, ends, usages=usages)
        private = key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        return Pair(_pem(signed), private)

    def files(self, name: str, pair: Pair | None = None) -> Files:
        """Write a pair, or one that is made for the user `name`; returns where."""
        pair = pair or self.issue(name)
        cert, key = self._directory / f"{name}.crt", self._directory / f"{name}.key"
        cert.write_bytes(pair.cert)
        key.write_bytes(pair.key)
        return Files(str(self.ca), str(cert), str(key))

    def _sign(
        self,
        subject: x509.Name,
        public_key: ec.EllipticCurvePublicKey,
        begins: timedelta,
        ends: timedelta,
        *,
        is_ca: bool = False,
        usages: list[x509.ObjectIdentifier] | None = None,
    ) -> x509.Certificate:
        now = datetime.datetime.now(UTC)
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(public_key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now + begins)
            .not_valid_after(now + ends)
            .add_extension(x509.BasicConstraints(ca=is_ca, path_length=None), critical=True)
        )
        if usages:
            builder = builder.add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        if usages and ExtendedKeyUsageOID.SERVER_AUTH in usages:
            address = x509.IPAddress(ipaddress.ip_address(self._host))
            builder = builder.add_extension(x509.SubjectAlternativeName([address]), critical=False)
        return builder.sign(self._key, hashes.SHA256())


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)
