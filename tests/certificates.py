"""Makes certificates for tests of TLS."""

import subprocess
from pathlib import Path

import tfswitch as tsw


def _openssl(*arguments: str | Path) -> None:
    subprocess.run(["openssl", *arguments], check=True, capture_output=True)


class Authority:
    """A private authority with a folder for its files.

    Attributes:
        ca: Its own certificate.
    """

    def __init__(self, folder: Path, name: str = "ca") -> None:
        self._folder = folder
        self._key = folder / f"{name}.key"
        self.ca = folder / f"{name}.pem"
        _openssl(
            *("req", "-x509", "-newkey", "ec", "-pkeyopt"),
            *("ec_paramgen_curve:P-256", "-nodes", "-days", "2"),
            *("-subj", f"/CN=tfswitch test {name}"),
            *("-keyout", self._key, "-out", self.ca),
        )

    def sign(
        self, name: str, alt_name: str = "IP:127.0.0.1", *, trusts: bool = False
    ) -> tsw.Tls:
        """Makes a certificate and its key, and replaces those of this name.

        Args:
            name: The name of the files.
            alt_name: Whose certificate it is.
            trusts: Whether `ca` of the result is this authority.
        """
        cert, key = (self._folder / f"{name}.{end}" for end in ("pem", "key"))
        # Renamed when they are whole: a server may watch them.
        new_cert, new_key, request, extension = (
            self._folder / f"{name}.{end}"
            for end in ("new", "nk", "csr", "ext")
        )
        extension.write_text(f"subjectAltName={alt_name}\n")
        _openssl(
            *("req", "-new", "-newkey", "ec", "-pkeyopt"),
            *("ec_paramgen_curve:P-256", "-nodes", "-subj", f"/CN={name}"),
            *("-keyout", new_key, "-out", request),
        )
        _openssl(
            *("x509", "-req", "-in", request, "-CA", self.ca),
            *("-CAkey", self._key, "-CAcreateserial", "-days", "2"),
            *("-extfile", extension, "-out", new_cert),
        )
        new_key.rename(key)
        new_cert.rename(cert)
        return tsw.Tls(ca=self.ca if trusts else None, cert=cert, key=key)
