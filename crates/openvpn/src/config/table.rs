//! Every directive of OpenVPN's manual, and what becomes of it in the file of a server and in a client's profile.

/// What becomes of a directive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Rule {
    /// It is read.
    Take,
    /// It is left out, and nothing is lost; why.
    Nothing(&'static str),
    /// It is left out, and something is lost; why, and what to do.
    Refuse(&'static str),
}

use Rule::{Nothing as N, Refuse as R, Take as T};

const DEVICE: Rule = N("Weft makes the device and sets its addresses and routes");
const PROCESS: Rule = N("Weft and systemd run the process and give up its rights");
const LOGS: Rule = N("messages go to the journal");
const SPEED: Rule = N("Weft sets its buffers and queues itself");
const WINDOWS: Rule = N("it has a meaning on Windows only");
const LIBRARY: Rule = N("the TLS library chooses secure parameters itself");
const COMMAND: Rule = N("it is a command of the openvpn program");
const OBSOLETE: Rule = N("OpenVPN 2.6 does nothing with it either");
const ALWAYS: Rule = N("Weft always does this");
const CLIENT_ONLY: Rule = N("it has a meaning in a client's profile only");
const SERVER_ONLY: Rule = N("it has a meaning on a server only");
const CLIENT_FILE: Rule = R("this is a client's profile: give the server's file");
const SERVER_FILE: Rule = R("this is a server's file: give a client's profile");
const SCRIPT: Rule = R("it runs a program, which Weft does not: what that program does is lost");
const TAP: Rule = R("Weft carries IP packets, no Ethernet frames: change dev tap to dev tun");
const HARDWARE: Rule =
    R("keys outside of files are not read: give certificate and key as PEM files");
const PROXY: Rule = R("Weft goes through no proxy: connect without it");
const MARK: Rule = R("the sockets of Weft have no mark or device: route by address or port");
const RENEGOTIATION: Rule = N("keys are renewed by time, and at the cipher's own limit");
const STATIC: Rule =
    R("a static key protects no tunnel: it has no forward secrecy; use certificates");
const VLAN: Rule = R("VLANs exist with dev tap only");
const MANAGEMENT: Rule = N("the management interface needs no setting for this");

const ENCRYPTED: Rule = R("the key must not be encrypted: decrypt it with openssl pkey");
const FOLDER: Rule =
    R("a folder of authorities is not read: put them into one file and name it with ca");
const CLIENT_FOLDER: Rule = R("it belongs into the file of a client in client-config-dir");
const PKCS12: Rule = R("PKCS #12 is not read: convert it with openssl pkcs12 to ca, cert and key");
const NEGOTIATED: Rule = R("ciphers are negotiated: name the only one in data-ciphers");
const REPLAY: Rule = R("packets are always protected from replay: remove it");
const USAGE: Rule = R("OpenVPN 2.5 removed it: use remote-cert-tls");
const USAGE_BITS: Rule = R("key usage bits are not compared: use remote-cert-tls");
const REMOTE_NAME: Rule = R("OpenVPN 2.4 removed it: use verify-x509-name");
const AUTHORITY_HASH: Rule = R(
    "fingerprints of authorities are not compared: use peer-fingerprint, or the authority itself",
);
const SEGMENTS: Rule = N("Weft sets the tunnel's MTU and the size of TCP segments");
const PROGRAMS: Rule = N("it is for programs that OpenVPN runs");
const MTU: Rule = N("tun-mtu says it");
const STATUS: Rule = N("weft status shows the same");
const COMPRESSION: Rule = N("Weft never compresses");
const TOKEN: Rule = R("a token does not outlive its session: log in again");
const SERVER_GIVES: Rule = R("the server gives the addresses: remove it");
const OWN_TRAFFIC: Rule =
    R("it would send the server's own traffic through the tunnel: push it to clients");
const SCRIPT_ORDER: Rule = N("it only orders a script");
const DIFFERENCES: Rule = N("a difference of options is a warning only");
const PLUGINS: Rule = N("it is for plugins");
const CONTROL_SIZE: Rule = N("control packets fit into any path");
const WINDOW: Rule = N("the window is that of the data channel device");
const BANDWIDTH: Rule = N("bandwidth is not limited here: use tc");
const MTU_SEARCH: Rule = N("paths search their MTU");
const PUSHED: Rule = R("it is pushed, never configured");
const TEMPORARY: Rule = N("no temporary files are written");
const ENGINES: Rule = N("Weft's engines need no choice here");
const COOKIE: Rule = N("it is a value of tls-crypt-v2");

/// Name, in the file of a server, in a client's profile.
pub(super) type Row = (&'static str, Rule, Rule);

/// The rule of a directive; `None`: OpenVPN 2.6 and 2.7 do not know it.
pub(super) fn row(name: &str) -> Option<&'static Row> {
    ROWS.iter().find(|(known, ..)| *known == name)
}

pub(super) const ROWS: &[Row] = &[
    ("allow-compression", COMPRESSION, COMPRESSION),
    ("allow-nonadmin", WINDOWS, WINDOWS),
    ("allow-pull-fqdn", CLIENT_ONLY, N("routes to names are not taken from a server")),
    ("allow-recursive-routing", CLIENT_ONLY, ALWAYS),
    ("askpass", ENCRYPTED, ENCRYPTED),
    ("auth", T, T),
    ("auth-gen-token", T, SERVER_ONLY),
    ("auth-gen-token-secret", T, SERVER_ONLY),
    ("auth-nocache", CLIENT_ONLY, ALWAYS),
    ("auth-retry", CLIENT_ONLY, N("a failed login ends with a message; start it again")),
    ("auth-token", CLIENT_ONLY, TOKEN),
    ("auth-token-user", CLIENT_ONLY, TOKEN),
    ("auth-user-pass", CLIENT_FILE, T),
    ("auth-user-pass-optional", T, SERVER_ONLY),
    ("auth-user-pass-verify", T, SERVER_ONLY),
    ("bcast-buffers", SPEED, SERVER_ONLY),
    ("bind", ALWAYS, N("a client's port is free")),
    ("bind-dev", MARK, MARK),
    ("block-ipv6", CLIENT_ONLY, T),
    ("block-outside-dns", CLIENT_ONLY, WINDOWS),
    ("ca", T, T),
    ("capath", FOLDER, FOLDER),
    ("ccd-exclusive", T, SERVER_ONLY),
    ("cd", T, T),
    ("cert", T, T),
    ("chroot", PROCESS, PROCESS),
    ("cipher", T, T),
    ("client", CLIENT_FILE, T),
    ("client-cert-not-required", T, SERVER_ONLY),
    ("client-config-dir", T, SERVER_ONLY),
    ("client-connect", SCRIPT, SERVER_ONLY),
    ("client-crresponse", SCRIPT, SERVER_ONLY),
    ("client-disconnect", SCRIPT, SERVER_ONLY),
    ("client-nat", CLIENT_ONLY, R("Weft translates no addresses: use nftables")),
    ("client-to-client", T, SERVER_ONLY),
    ("comp-lzo", T, T),
    ("comp-noadapt", COMPRESSION, COMPRESSION),
    (
        "compat-mode",
        N("what old clients need is found out from each"),
        N("what an old server needs is found out"),
    ),
    ("compat-names", OBSOLETE, OBSOLETE),
    ("compress", T, T),
    ("config", T, T),
    ("connect-freq", T, SERVER_ONLY),
    ("connect-freq-initial", T, SERVER_ONLY),
    ("connect-retry", CLIENT_ONLY, T),
    ("connect-retry-max", CLIENT_ONLY, T),
    ("connect-timeout", CLIENT_ONLY, T),
    ("connection", CLIENT_FILE, T),
    ("crl-verify", T, T),
    ("cryptoapicert", HARDWARE, HARDWARE),
    ("daemon", PROCESS, PROCESS),
    ("data-ciphers", T, T),
    ("data-ciphers-fallback", T, T),
    ("dev", T, T),
    ("dev-node", DEVICE, DEVICE),
    ("dev-type", T, T),
    ("dh", N("key agreement is by elliptic curves, which all clients since 2.4 have"), SERVER_ONLY),
    ("dhcp-internal", WINDOWS, WINDOWS),
    ("dhcp-option", CLIENT_ONLY, T),
    ("dhcp-pre-release", WINDOWS, WINDOWS),
    ("dhcp-release", WINDOWS, WINDOWS),
    ("dhcp-renew", WINDOWS, WINDOWS),
    ("disable", CLIENT_FOLDER, SERVER_ONLY),
    ("disable-dco", ENGINES, ENGINES),
    ("disable-occ", DIFFERENCES, DIFFERENCES),
    ("dns", CLIENT_ONLY, T),
    ("dns-updown", CLIENT_ONLY, N("Weft sets names itself")),
    ("down", SCRIPT, SCRIPT),
    ("down-pre", SCRIPT_ORDER, SCRIPT_ORDER),
    ("duplicate-cn", T, SERVER_ONLY),
    ("ecdh-curve", LIBRARY, SERVER_ONLY),
    ("echo", LOGS, LOGS),
    ("engine", HARDWARE, HARDWARE),
    ("errors-to-stderr", LOGS, LOGS),
    ("explicit-exit-notify", T, T),
    ("extra-certs", T, T),
    ("fast-io", SPEED, SPEED),
    ("float", ALWAYS, ALWAYS),
    ("force-cookie", COOKIE, COOKIE),
    ("force-tls-key-material-export", T, N("keys come from the exporter where the server can")),
    ("foreign-option", CLIENT_ONLY, PROGRAMS),
    (
        "fragment",
        R("packets are not cut inside the tunnel: remove it here and in all profiles"),
        R("packets are not cut inside the tunnel: remove it here and at the server"),
    ),
    ("genkey", COMMAND, COMMAND),
    ("gremlin", COMMAND, COMMAND),
    ("group", PROCESS, PROCESS),
    ("hand-window", T, T),
    ("hash-size", SPEED, SERVER_ONLY),
    ("help", COMMAND, COMMAND),
    ("http-proxy", CLIENT_ONLY, PROXY),
    ("http-proxy-option", CLIENT_ONLY, PROXY),
    ("http-proxy-override", CLIENT_ONLY, PROXY),
    ("http-proxy-retry", OBSOLETE, OBSOLETE),
    ("http-proxy-timeout", OBSOLETE, OBSOLETE),
    ("http-proxy-user-pass", CLIENT_ONLY, PROXY),
    ("ifconfig", T, SERVER_GIVES),
    ("ifconfig-ipv6", T, SERVER_GIVES),
    ("ifconfig-ipv6-pool", T, SERVER_ONLY),
    ("ifconfig-ipv6-push", CLIENT_FOLDER, SERVER_ONLY),
    ("ifconfig-noexec", DEVICE, DEVICE),
    ("ifconfig-nowarn", LOGS, LOGS),
    ("ifconfig-pool", T, SERVER_ONLY),
    ("ifconfig-pool-linear", OBSOLETE, SERVER_ONLY),
    ("ifconfig-pool-persist", T, SERVER_ONLY),
    ("ifconfig-push", CLIENT_FOLDER, SERVER_ONLY),
    ("ignore-unknown-option", T, T),
    ("inactive", N("an idle client stays: set inactive by push"), T),
    ("inetd", PROCESS, PROCESS),
    ("ip-win32", WINDOWS, WINDOWS),
    ("ipchange", SCRIPT, SCRIPT),
    ("iproute", DEVICE, DEVICE),
    ("iroute", CLIENT_FOLDER, SERVER_ONLY),
    ("iroute-ipv6", CLIENT_FOLDER, SERVER_ONLY),
    ("keepalive", T, T),
    ("key", T, T),
    ("key-derivation", PUSHED, PUSHED),
    ("key-direction", T, T),
    ("key-method", OBSOLETE, OBSOLETE),
    ("keying-material-exporter", PLUGINS, PLUGINS),
    ("keysize", OBSOLETE, OBSOLETE),
    ("learn-address", SCRIPT, SERVER_ONLY),
    ("link-mtu", MTU, MTU),
    ("lladdr", TAP, TAP),
    ("local", T, T),
    ("log", LOGS, LOGS),
    ("log-append", LOGS, LOGS),
    ("lport", T, T),
    ("machine-readable-output", LOGS, LOGS),
    ("management", T, STATUS),
    ("management-client", R("the management interface listens, it does not connect"), STATUS),
    (
        "management-client-auth",
        R("logins are not decided over the management interface: use PAM, a program or OIDC"),
        SERVER_ONLY,
    ),
    ("management-client-group", MANAGEMENT, MANAGEMENT),
    ("management-client-pf", OBSOLETE, OBSOLETE),
    ("management-client-user", MANAGEMENT, MANAGEMENT),
    ("management-external-cert", HARDWARE, HARDWARE),
    ("management-external-key", HARDWARE, HARDWARE),
    ("management-forget-disconnect", MANAGEMENT, MANAGEMENT),
    ("management-hold", MANAGEMENT, MANAGEMENT),
    ("management-log-cache", MANAGEMENT, MANAGEMENT),
    ("management-query-passwords", MANAGEMENT, MANAGEMENT),
    ("management-query-proxy", MANAGEMENT, PROXY),
    ("management-query-remote", MANAGEMENT, MANAGEMENT),
    ("management-signal", MANAGEMENT, MANAGEMENT),
    ("management-up-down", MANAGEMENT, MANAGEMENT),
    ("mark", MARK, MARK),
    ("max-clients", T, SERVER_ONLY),
    ("max-packet-size", CONTROL_SIZE, CONTROL_SIZE),
    ("max-routes", OBSOLETE, OBSOLETE),
    ("max-routes-per-client", N("a client has the routes of its file"), SERVER_ONLY),
    ("memstats", LOGS, LOGS),
    ("mktun", COMMAND, COMMAND),
    ("mlock", PROCESS, PROCESS),
    ("mode", T, T),
    ("mssfix", SEGMENTS, SEGMENTS),
    ("mtu-disc", SPEED, SPEED),
    ("mtu-test", MTU_SEARCH, MTU_SEARCH),
    ("multihome", ALWAYS, ALWAYS),
    ("mute", LOGS, LOGS),
    ("mute-replay-warnings", LOGS, LOGS),
    ("ncp-ciphers", T, T),
    ("ncp-disable", NEGOTIATED, NEGOTIATED),
    ("nice", PROCESS, PROCESS),
    ("no-iv", OBSOLETE, OBSOLETE),
    ("no-name-remapping", OBSOLETE, OBSOLETE),
    ("no-replay", REPLAY, REPLAY),
    ("nobind", CLIENT_ONLY, ALWAYS),
    ("ns-cert-type", USAGE, USAGE),
    ("opt-verify", R("clients with other options are warned, not refused: remove it"), OBSOLETE),
    ("parameter", LOGS, LOGS),
    ("passtos", ALWAYS, ALWAYS),
    ("pause-exit", WINDOWS, WINDOWS),
    ("peer-fingerprint", T, T),
    ("peer-id", PUSHED, PUSHED),
    ("persist-key", PROCESS, PROCESS),
    ("persist-local-ip", PROCESS, PROCESS),
    ("persist-remote-ip", PROCESS, PROCESS),
    ("persist-tun", PROCESS, PROCESS),
    ("ping", T, T),
    ("ping-exit", N("the server never ends by itself"), T),
    ("ping-restart", T, T),
    ("ping-timer-rem", ALWAYS, ALWAYS),
    ("pkcs11-cert-private", HARDWARE, HARDWARE),
    ("pkcs11-id", HARDWARE, HARDWARE),
    ("pkcs11-id-management", HARDWARE, HARDWARE),
    ("pkcs11-pin-cache", HARDWARE, HARDWARE),
    ("pkcs11-private-mode", HARDWARE, HARDWARE),
    ("pkcs11-protected-authentication", HARDWARE, HARDWARE),
    ("pkcs11-providers", HARDWARE, HARDWARE),
    ("pkcs12", PKCS12, PKCS12),
    ("plugin", T, SCRIPT),
    ("port", T, T),
    ("port-share", R("a port is not shared with a web server: give each its own"), SERVER_ONLY),
    ("preresolve", CLIENT_ONLY, ALWAYS),
    ("prng", LIBRARY, LIBRARY),
    ("protocol-flags", PUSHED, PUSHED),
    ("proto", T, T),
    ("proto-force", CLIENT_ONLY, T),
    ("providers", LIBRARY, LIBRARY),
    ("pull", CLIENT_FILE, T),
    ("pull-filter", CLIENT_ONLY, T),
    ("push", T, SERVER_ONLY),
    ("push-continuation", PUSHED, PUSHED),
    ("push-peer-info", CLIENT_ONLY, T),
    ("push-remove", CLIENT_FOLDER, SERVER_ONLY),
    ("push-reset", CLIENT_FOLDER, SERVER_ONLY),
    ("rcvbuf", SPEED, SPEED),
    ("rdns-internal", WINDOWS, WINDOWS),
    ("redirect-gateway", OWN_TRAFFIC, T),
    ("redirect-private", OWN_TRAFFIC, T),
    ("register-dns", CLIENT_ONLY, WINDOWS),
    ("remap-usr1", PROCESS, PROCESS),
    ("remote", CLIENT_FILE, T),
    ("remote-cert-eku", T, T),
    ("remote-cert-ku", USAGE_BITS, USAGE_BITS),
    ("remote-cert-tls", T, T),
    ("remote-random", CLIENT_ONLY, T),
    ("remote-random-hostname", CLIENT_ONLY, R("names are looked up as they are: remove it")),
    ("reneg-bytes", RENEGOTIATION, RENEGOTIATION),
    ("reneg-pkts", RENEGOTIATION, RENEGOTIATION),
    ("reneg-sec", T, T),
    ("replay-persist", RENEGOTIATION, RENEGOTIATION),
    ("replay-window", WINDOW, WINDOW),
    ("resolv-retry", CLIENT_ONLY, T),
    ("rmtun", COMMAND, COMMAND),
    ("route", T, T),
    ("route-delay", DEVICE, DEVICE),
    ("route-gateway", DEVICE, T),
    ("route-ipv6", T, T),
    ("route-ipv6-gateway", DEVICE, T),
    ("route-method", WINDOWS, WINDOWS),
    ("route-metric", DEVICE, T),
    ("route-noexec", DEVICE, T),
    ("route-nopull", CLIENT_ONLY, T),
    ("route-pre-down", SCRIPT, SCRIPT),
    ("route-up", SCRIPT, SCRIPT),
    ("rport", CLIENT_ONLY, T),
    (
        "script-security",
        N("Weft runs only the program of auth-user-pass-verify"),
        N("Weft runs no program"),
    ),
    ("secret", STATIC, STATIC),
    ("server", T, SERVER_FILE),
    ("server-bridge", TAP, SERVER_FILE),
    ("server-ipv6", T, SERVER_FILE),
    ("server-poll-timeout", CLIENT_ONLY, T),
    ("service", WINDOWS, WINDOWS),
    ("session-timeout", N("set session-timeout by push"), T),
    ("setcon", PROCESS, PROCESS),
    ("setenv", T, T),
    ("setenv-safe", T, PROGRAMS),
    ("shaper", BANDWIDTH, BANDWIDTH),
    ("show-adapters", COMMAND, COMMAND),
    ("show-ciphers", COMMAND, COMMAND),
    ("show-curves", COMMAND, COMMAND),
    ("show-digests", COMMAND, COMMAND),
    ("show-engines", COMMAND, COMMAND),
    ("show-gateway", COMMAND, COMMAND),
    ("show-groups", COMMAND, COMMAND),
    ("show-net", COMMAND, COMMAND),
    ("show-net-up", COMMAND, COMMAND),
    ("show-pkcs11-ids", COMMAND, COMMAND),
    ("show-tls", COMMAND, COMMAND),
    ("show-valid-subnets", COMMAND, COMMAND),
    ("single-session", PROCESS, PROCESS),
    ("sndbuf", SPEED, SPEED),
    ("socket-flags", SPEED, SPEED),
    ("socks-proxy", CLIENT_ONLY, PROXY),
    ("socks-proxy-retry", OBSOLETE, OBSOLETE),
    ("stale-routes-check", N("only configured routes lead to clients"), SERVER_ONLY),
    ("static-challenge", CLIENT_ONLY, T),
    ("status", T, STATUS),
    ("status-version", T, STATUS),
    ("suppress-timestamps", LOGS, LOGS),
    ("syslog", LOGS, LOGS),
    ("tap-sleep", WINDOWS, WINDOWS),
    ("tcp-nodelay", ALWAYS, ALWAYS),
    ("tcp-queue-limit", SPEED, SPEED),
    ("test-crypto", COMMAND, COMMAND),
    ("tls-auth", T, T),
    ("tls-cert-profile", T, T),
    ("tls-cipher", LIBRARY, LIBRARY),
    ("tls-ciphersuites", LIBRARY, LIBRARY),
    ("tls-client", CLIENT_FILE, T),
    ("tls-crypt", T, T),
    ("tls-crypt-v2", T, T),
    (
        "tls-crypt-v2-max-age",
        R("the age of client keys is not checked: revoke clients instead"),
        SERVER_ONLY,
    ),
    ("tls-crypt-v2-verify", SCRIPT, SERVER_ONLY),
    ("tls-exit", PROCESS, PROCESS),
    ("tls-export-cert", SCRIPT, SCRIPT),
    ("tls-groups", LIBRARY, LIBRARY),
    ("tls-remote", REMOTE_NAME, REMOTE_NAME),
    ("tls-server", T, SERVER_FILE),
    ("tls-timeout", T, T),
    ("tls-verify", SCRIPT, SCRIPT),
    ("tls-version-max", T, T),
    ("tls-version-min", T, T),
    ("tmp-dir", TEMPORARY, TEMPORARY),
    ("topology", T, T),
    ("tran-window", T, T),
    ("tun-ipv6", OBSOLETE, OBSOLETE),
    ("tun-max-mtu", MTU, MTU),
    ("tun-mtu", T, T),
    ("tun-mtu-extra", TAP, TAP),
    ("tun-mtu-max", MTU, MTU),
    ("txqueuelen", SPEED, SPEED),
    ("udp-mtu", MTU, MTU),
    ("unlock", OBSOLETE, OBSOLETE),
    ("up", SCRIPT, SCRIPT),
    ("up-delay", DEVICE, DEVICE),
    ("up-restart", SCRIPT_ORDER, SCRIPT_ORDER),
    ("use-prediction-resistance", LIBRARY, LIBRARY),
    ("user", PROCESS, PROCESS),
    ("username-as-common-name", T, SERVER_ONLY),
    ("verb", LOGS, LOGS),
    ("verify-client-cert", T, SERVER_ONLY),
    ("verify-hash", AUTHORITY_HASH, AUTHORITY_HASH),
    ("verify-x509-name", T, T),
    ("version", COMMAND, COMMAND),
    ("vlan-accept", VLAN, VLAN),
    ("vlan-pvid", VLAN, VLAN),
    ("vlan-tagging", VLAN, VLAN),
    ("win-sys", WINDOWS, WINDOWS),
    ("windows-driver", WINDOWS, WINDOWS),
    ("writepid", PROCESS, PROCESS),
    ("x509-track", PROGRAMS, PROGRAMS),
    ("x509-username-field", T, SERVER_ONLY),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_directive_has_one_row() {
        let mut names: Vec<&str> = ROWS.iter().map(|(name, ..)| *name).collect();
        let count = names.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), count);
        assert_eq!(row("fragment").map(|row| matches!(row.1, R(_))), Some(true));
        assert_eq!(row("no-such-directive"), None);
    }
}
