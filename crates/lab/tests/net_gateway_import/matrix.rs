//! Transports, wrappings, ciphers, versions of TLS and kinds of keys, so that every two values of these meet.

use std::path::PathBuf;

use anyhow::{Context, ensure};
use weft_bench::sandbox::{Container, try_wait_until};
use weft_lab::net::gateway::{LIMIT, Machine, connected};
use weft_lab::net::namespace;
use weft_lab::net::probe::{CONNECTION_BYTES, connection_arrives};
use weft_lab::pairs::{covering, missing};

use crate::pki::{Keys, run};
use crate::stage::{SERVER, Stage};

/// A wrapping: the server's line, the client's, and the block of its key in the profile.
const WRAPPINGS: [(&str, &str, &str); 5] = [
    ("", "", ""),
    ("tls-auth ta.key 0", "key-direction 1", "tls-auth"),
    ("tls-auth ta.key", "", "tls-auth"),
    ("tls-crypt ta.key", "", "tls-crypt"),
    ("tls-crypt-v2 v2.key", "", "tls-crypt-v2"),
];
const CIPHERS: [&str; 3] = ["AES-256-GCM", "AES-128-GCM", "CHACHA20-POLY1305"];
const KEYS: [Keys; 2] = [Keys::Rsa, Keys::Ecdsa];
/// Of tls-auth.
const DIGESTS: [&str; 3] = ["SHA256", "SHA512", "SHA1"];
/// Over UDP or TCP, over IPv4 or IPv6, then the lists above, TLS 1.2 or 1.3 between them.
const SIZES: [usize; 7] = [2, 2, WRAPPINGS.len(), CIPHERS.len(), 2, KEYS.len(), DIGESTS.len()];

/// A row of the matrix.
#[derive(Clone, Copy, Debug)]
struct Case {
    is_tcp: bool,
    is_ipv4: bool,
    wrapping: (&'static str, &'static str, &'static str),
    cipher: &'static str,
    /// TLS 1.2, or 1.3.
    is_old: bool,
    keys: Keys,
    digest: &'static str,
}

impl Case {
    fn all() -> anyhow::Result<Vec<Self>> {
        let rows = covering(&SIZES);
        let missed = missing(&SIZES, &rows);
        ensure!(missed.is_empty(), "pairs that no row has: {missed:?}");
        rows.iter().map(|row| Self::of(row).context("a row is too short")).collect()
    }

    fn of(row: &[usize]) -> Option<Self> {
        let [tcp, ipv6, wrapping, cipher, old, keys, digest] = *row else { return None };
        Some(Self {
            is_tcp: tcp == 1,
            is_ipv4: ipv6 == 0,
            wrapping: *WRAPPINGS.get(wrapping)?,
            cipher: CIPHERS.get(cipher)?,
            is_old: old == 1,
            keys: *KEYS.get(keys)?,
            digest: DIGESTS.get(digest)?,
        })
    }

    /// The server's configuration. The client limits TLS to 1.2, the server to 1.3.
    fn config(&self) -> String {
        let server = SERVER.replace("auth SHA256", &format!("auth {}", self.digest));
        let server = server.replace(
            "data-ciphers AES-256-GCM:AES-128-GCM",
            &format!("data-ciphers {}", self.cipher),
        );
        let tls = if self.is_old { "tls-version-min 1.2" } else { "tls-version-min 1.3" };
        format!("{server}{}\n{tls}\n", self.wrapping.0)
    }

    fn profile(&self, stage: &Stage) -> anyhow::Result<PathBuf> {
        let (_, more, block) = self.wrapping;
        let tls = if self.is_old { "tls-version-max 1.2" } else { "" };
        let key = match block {
            "" => String::new(),
            block => {
                let file = if block == "tls-crypt-v2" { "client-v2.key" } else { "ta.key" };
                format!("<{block}>\n{}</{block}>", stage.pki.text(file)?)
            }
        };
        let profile = stage.profile("alice", &format!("{more}\n{tls}\n{key}"))?;
        let text = std::fs::read_to_string(&profile)?;
        std::fs::write(&profile, text.replace("auth SHA256", &format!("auth {}", self.digest)))?;
        Ok(profile)
    }

    /// A client connects so, is shown so, and a connection carries both ways.
    fn holds(&self, stage: &Stage, machine: &Machine, container: &Container) -> anyhow::Result<()> {
        let mut process = machine.start(&self.profile(stage)?)?;
        let version = if self.is_old { "TLSv1.2," } else { "TLSv1.3," };
        let said = process.line_with("Control Channel: TLS", LIMIT)?;
        ensure!(said.contains(version), "{said}");
        let mut client = connected(process)?;
        let to = container.ipv4()?.into();
        machine.wait_ping(to)?;
        let (from, inside) = (PathBuf::from(machine.netns.path()), namespace(container));
        let own = (from.as_path(), client.address.into());
        connection_arrives(own, (&inside, to))?;
        connection_arrives((&inside, to), own)?;
        let shown = stage.clients()?;
        let [shown] = &shown[..] else { anyhow::bail!("not one client: {shown:?}") };
        ensure!(shown["name"] == "alice" && shown["cipher"] == self.cipher, "{shown}");
        let protocol = if self.is_tcp { "tcp" } else { "udp" };
        ensure!(shown["protocol"] == protocol, "{shown}");
        let from = if self.is_ipv4 { "198.51.1.2:" } else { "[2001:db8:1::2]:" };
        ensure!(shown["real_address"].as_str().is_some_and(|it| it.starts_with(from)), "{shown}");
        for way in ["bytes_in", "bytes_out"] {
            ensure!(shown[way].as_u64() > Some(CONNECTION_BYTES as u64), "{way}: {shown}");
        }
        client.process.terminate(LIMIT)?;
        try_wait_until("the client to be gone", LIMIT, || {
            Ok(stage.clients().is_ok_and(|clients| clients.is_empty()))
        })?;
        Ok(())
    }
}

#[test]
fn a_stock_client_is_served_in_every_pair_of_ways() -> anyhow::Result<()> {
    let cases = Case::all()?;
    for keys in KEYS {
        let stage = Stage::new(keys)?;
        let words =
            ["--tls-crypt-v2", "v2.key", "--genkey", "tls-crypt-v2-client", "client-v2.key"];
        run(&stage.folder, "openvpn", &words)?;
        let mut machine = stage.machine(1)?;
        let mut container = None;
        for case in cases.iter().filter(|case| case.keys == keys) {
            stage.imported(&case.config(), &[])?;
            let container = match &mut container {
                Some(container) => container,
                empty => {
                    stage.serve(&["--listen", "1194", "--listen", "tcp:1194"])?;
                    empty.insert(stage.host().add_container_with("c1", &["--network", "openvpn"])?)
                }
            };
            (machine.is_tcp, machine.is_ipv4) = (case.is_tcp, case.is_ipv4);
            case.holds(&stage, &machine, container).with_context(|| format!("{case:?}"))?;
        }
    }
    Ok(())
}
