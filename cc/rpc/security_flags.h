// The --help texts of flags that all server programs have.

#ifndef TFSWITCH_CC_RPC_SECURITY_FLAGS_H_
#define TFSWITCH_CC_RPC_SECURITY_FLAGS_H_

namespace tfswitch {

inline constexpr char kTlsCertHelp[] =
    "PEM file with the server's certificate, followed by those between it "
    "and its authority. Clients then speak TLS (grpcs://). It is read "
    "again when it has changed, as the two below. Empty: plaintext.";
inline constexpr char kTlsKeyHelp[] =
    "PEM file with the key of --tls_cert, without a password.";
inline constexpr char kTlsCaHelp[] =
    "PEM file with authorities. Clients must show a certificate that one "
    "of them has signed. Empty: they need none.";
inline constexpr char kTokenFileHelp[] =
    "File with the hashes of tokens, which `tfswitch token create` "
    "writes. Callers must show one of them. It is read again when it has "
    "changed. Empty: they need none.";
inline constexpr char kInsecureHelp[] =
    "Serve on an address that other machines can reach, although there "
    "is no TLS, or neither --token_file nor --tls_ca.";
inline constexpr char kHttpAddressHelp[] =
    "Where to answer /metrics (for Prometheus), /healthz and /readyz over "
    "HTTP: "
    "host:port (port 0: any free one), with the TLS and the tokens of "
    "--address. Empty: nowhere.";
inline constexpr char kReflectionHelp[] =
    "Tell callers which services and messages there are, by gRPC's "
    "reflection service. It asks for no token.";

}  // namespace tfswitch

#endif  // TFSWITCH_CC_RPC_SECURITY_FLAGS_H_
