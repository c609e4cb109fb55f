"""What went wrong with TLS, in words for the side that noticed it; ``ssl``'s own are for programmers."""

from __future__ import annotations

import ssl

from p2ptrain.core.errors import ConnectionLost, P2PTrainError, ProtocolError, Refused

JOIN_AGAIN = "join again with a fresh ticket: p2ptrain ticket new, at the seed"
CHECK_CLOCKS = "check the date and time of both machines"

# X509_V_ERR_* of OpenSSL, which the ssl module gives as numbers.
_NOT_YET_VALID, _EXPIRED, _WRONG_PURPOSE = 9, 10, 26
_VERIFY = {
    _NOT_YET_VALID: ("certificate-not-yet-valid", "a certificate that is not valid yet", CHECK_CLOCKS),
    _EXPIRED: ("certificate-expired", "an expired certificate", f"{CHECK_CLOCKS}, or {JOIN_AGAIN}"),
    _WRONG_PURPOSE: ("certificate-untrusted", "a certificate made for something else", JOIN_AGAIN),
}
_UNTRUSTED = (
    "certificate-untrusted",
    "a certificate that this cluster's CA did not sign: it belongs to another cluster, or somebody is in between",
    f"check the address; if the seed was set up anew, {JOIN_AGAIN}",
)

# The end of SSLError.reason, of alerts that the other side sent (RFC 8446, section 6.2).
_ALERTS = {
    "CERTIFICATE_REQUIRED": ("not-permitted", "it wants a certificate, and this side has none", JOIN_AGAIN),
    "CERTIFICATE_EXPIRED": ("certificate-expired", "this side's certificate has expired", JOIN_AGAIN),
    "UNKNOWN_CA": ("certificate-untrusted", "this side's certificate is not of its cluster", JOIN_AGAIN),
    "BAD_CERTIFICATE": ("certificate-untrusted", "this side's certificate is bad, or not valid yet", CHECK_CLOCKS),
    "CERTIFICATE_UNKNOWN": ("certificate-untrusted", "this side's certificate is not acceptable", JOIN_AGAIN),
    "CERTIFICATE_REVOKED": ("certificate-untrusted", "this side's certificate was revoked", JOIN_AGAIN),
    "INTERNAL_ERROR": ("busy", "too many handshakes are under way there", "try again in a few seconds"),
}


def tls_problem(error: ssl.SSLError, who: str) -> P2PTrainError:
    """What to tell of ``error``, which ended the TLS connection with ``who`` (host and port)."""
    if isinstance(error, ssl.SSLCertVerificationError):
        code, what, remedy = _VERIFY.get(error.verify_code, _UNTRUSTED)
        return Refused(code, f"{who} presented {what}", remedy=remedy)
    reason = error.reason or ""
    if "ALERT" in reason:
        for name, (code, what, remedy) in _ALERTS.items():
            if reason.endswith(name):
                return Refused(code, f"{who} refuses: {what}", remedy=remedy)
        return ConnectionLost(f"{who} ended TLS: {_words(reason)}")
    if reason == "PEER_DID_NOT_RETURN_A_CERTIFICATE":
        return Refused("not-permitted", f"{who} presented no certificate", remedy=JOIN_AGAIN)
    return ProtocolError(f"{who} does not speak TLS as it should: {_words(reason) or 'no reason given'}")


def _words(reason: str) -> str:
    return reason.replace("_", " ").lower()
