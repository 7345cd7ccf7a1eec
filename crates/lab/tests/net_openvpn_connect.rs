//! `weft openvpn connect` to a stock server: Debian's `openvpn` 2.6 without offload. In a guest of the VM lab the client
//! is on the kernel's device.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, ensure};
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose,
};
use rustix::process::Signal;
use serde_json::Value;
use weft_bench::sandbox::{Host, Netns, Running, Sandbox, SandboxOptions, require, try_wait_until};

const LIMIT: Duration = Duration::from_secs(30);
/// From a server's silence to a new connection: its ping-restart, pauses and a handshake.
const BACK_LIMIT: Duration = Duration::from_secs(60);
const SERVES: &str = "Initialization Sequence Completed";
const CONNECTED: &str = r#""event":"connected""#;
/// Behind the server, by a pushed route.
const BEHIND: &str = "172.31.0.1";
/// Of the server, in the tunnel.
const INSIDE: &str = "10.9.0.1";
/// What is always in a profile and in a server's words.
const PROFILE: &str =
    "client\ndev tun\nnobind\nremote-cert-tls server\nverify-x509-name server name\n";
const SERVER: &str = "--dev tun0 --topology subnet --server 10.9.0.0 255.255.255.0 --dh none \
                      --verb 4 --keepalive 1 5 --disable-dco --port 1194";

/// A host with a stock server and one that connects to it.
struct Stage {
    sandbox: Sandbox,
}

impl Stage {
    fn new() -> anyhow::Result<Self> {
        require("openvpn", "openvpn")?;
        let stage = Self { sandbox: Sandbox::new(&SandboxOptions::default())? };
        stage.write_certificates()?;
        stage.far().ip(&format!("addr add {BEHIND}/24 dev lo"))?;
        Ok(stage)
    }

    fn far(&self) -> &Netns {
        self.sandbox.host(0).netns()
    }

    fn near(&self) -> &Host {
        self.sandbox.host(1)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.sandbox.directory().join(name)
    }

    fn write(&self, name: &str, text: &str) -> anyhow::Result<()> {
        Ok(std::fs::write(self.path(name), text)?)
    }

    fn write_certificates(&self) -> anyhow::Result<()> {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.distinguished_name.push(DnType::CommonName, "authority");
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        let key = KeyPair::generate()?;
        self.write("ca.pem", &params.self_signed(&key)?.pem())?;
        let issuer = Issuer::new(params, key);
        let both = [
            ("server", ExtendedKeyUsagePurpose::ServerAuth),
            ("client", ExtendedKeyUsagePurpose::ClientAuth),
        ];
        for (name, usage) in both {
            let mut params = CertificateParams::new([format!("{name}.example")])?;
            params.distinguished_name.push(DnType::CommonName, name);
            params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
            params.extended_key_usages = vec![usage];
            let key = KeyPair::generate()?;
            self.write(&format!("{name}.pem"), &params.signed_by(&key, &issuer)?.pem())?;
            self.write(&format!("{name}.key"), &key.serialize_pem())?;
        }
        Ok(())
    }

    /// Starts a stock server with further words.
    fn serve(&self, more: &str) -> anyhow::Result<Running> {
        let files = ["ca.pem", "server.pem", "server.key"].map(|name| self.shown(name));
        let mut words = vec!["openvpn", "--ca", &files[0], "--cert", &files[1], "--key", &files[2]];
        words.extend(SERVER.split_whitespace().chain(more.split_whitespace()));
        words.extend(["--push", "route 172.31.0.0 255.255.255.0"]);
        let mut server = self.far().spawn(&words)?;
        server.line_with(SERVES, LIMIT)?;
        Ok(server)
    }

    fn shown(&self, name: &str) -> String {
        self.path(name).display().to_string()
    }

    /// A profile, whose files are named in it.
    fn profile(&self, remote: &str, more: &str) -> anyhow::Result<PathBuf> {
        let files = "ca ca.pem\ncert client.pem\nkey client.key\n";
        self.write("client.ovpn", &format!("{PROFILE}{files}remote {remote}\n{more}\n"))?;
        Ok(self.path("client.ovpn"))
    }

    /// Starts our client, and waits for its connection.
    fn connect(&self, profile: &Path) -> anyhow::Result<(Running, Value)> {
        let profile = profile.display().to_string();
        let words = ["openvpn", "connect", &profile, "--json"];
        let mut client = self.near().spawn_weft(&words)?;
        let connected = connected(&mut client, LIMIT)?;
        // Nothing else loads the kernel's module.
        let has_kernels = Path::new("/sys/module/ovpn").exists();
        let engine = if has_kernels { "kernel" } else { "userspace" };
        ensure!(connected["engine"] == engine, "{connected}");
        Ok((client, connected))
    }

    fn wait_ping(&self, to: &str) -> anyhow::Result<()> {
        try_wait_until(&format!("an answer from {to}"), LIMIT, || {
            let words = ["ping", "-n", "-c", "1", "-W", "1", to];
            Ok(self.near().netns().exec(&words)?.status.success())
        })?;
        Ok(())
    }

    /// Megabytes over TCP through the tunnel, one way and the other.
    fn transfer(&self) -> anyhow::Result<()> {
        let mut server = self.far().spawn(&["iperf3", "-s", "-1", "-B", INSIDE, "--forceflush"])?;
        server.line_with("Server listening", LIMIT)?;
        let words = ["iperf3", "-J", "-c", INSIDE, "-n", "20M", "--bidir"];
        let report = self.near().netns().exec(&words)?.success()?.json()?;
        ensure!(report["error"].is_null(), "{report}");
        Ok(())
    }

    /// Devices, addresses and routes of the client's host.
    fn state(&self) -> anyhow::Result<String> {
        let mut state = String::new();
        for words in ["-br addr", "route show table main", "-6 route show table main"] {
            state += &self.near().netns().ip(words)?.stdout;
        }
        Ok(state)
    }

    /// A server and a client of each transport with these words; it connects, and leaves nothing behind.
    fn goes_and_leaves_nothing(&self, server: &str, client: &str) -> anyhow::Result<()> {
        let (v4, v6) = (self.sandbox.host(0).ipv4(), self.sandbox.host(0).ipv6());
        let remotes = [
            ("udp", format!("{v4} 1194 udp")),
            ("tcp-server", format!("{v4} 1194 tcp")),
            ("udp6", format!("{v6} 1194 udp6")),
        ];
        for (proto, remote) in remotes {
            let before = self.state()?;
            let _server = self.serve(&format!("{server} --proto {proto}"))?;
            let (mut running, connected) = self.connect(&self.profile(&remote, client)?)?;
            ensure!(connected["addresses"][0] == "10.9.0.2/24", "{connected}");
            self.wait_ping(BEHIND)?;
            self.transfer()?;
            ensure!(self.state()? != before, "{proto}: nothing was set up");
            ensure!(running.terminate(LIMIT)?.success(), "{proto}: a signal is no failure");
            ensure!(self.state()? == before, "{proto}: {before} became {}", self.state()?);
        }
        Ok(())
    }
}

fn connected(client: &mut Running, limit: Duration) -> anyhow::Result<Value> {
    let line = client.line_with(CONNECTED, limit)?;
    serde_json::from_str(&line).with_context(|| line.clone())
}

fn genkey(stage: &Stage, words: &[&str], file: &str) -> anyhow::Result<()> {
    let path = stage.shown(file);
    let words = [&["openvpn"], words, &[path.as_str()]].concat();
    stage.far().exec(&words)?.success()?;
    Ok(())
}

#[test]
fn it_connects_with_tls_crypt_and_leaves_nothing_behind() -> anyhow::Result<()> {
    let stage = Stage::new()?;
    genkey(&stage, &["--genkey", "secret"], "static.key")?;
    let server = format!("--tls-crypt {}", stage.shown("static.key"));
    stage.goes_and_leaves_nothing(&server, "tls-crypt static.key")
}

#[test]
fn it_connects_with_tls_crypt_v2_and_leaves_nothing_behind() -> anyhow::Result<()> {
    let stage = Stage::new()?;
    genkey(&stage, &["--genkey", "tls-crypt-v2-server"], "server.v2")?;
    let key = stage.shown("server.v2");
    genkey(&stage, &["--tls-crypt-v2", &key, "--genkey", "tls-crypt-v2-client"], "client.v2")?;
    stage.goes_and_leaves_nothing(&format!("--tls-crypt-v2 {key}"), "tls-crypt-v2 client.v2")
}

#[test]
fn it_comes_back_to_a_server_that_was_away() -> anyhow::Result<()> {
    let stage = Stage::new()?;
    let mut server = stage.serve("--proto udp")?;
    let remote = format!("{} 1194", stage.sandbox.host(0).ipv4());
    let (mut client, _) = stage.connect(&stage.profile(&remote, "connect-timeout 3")?)?;
    stage.wait_ping(BEHIND)?;
    server.terminate(LIMIT)?;
    client.line_with(r#""event":"lost""#, BACK_LIMIT)?;
    let _server = stage.serve("--proto udp")?;
    connected(&mut client, BACK_LIMIT)?;
    stage.wait_ping(BEHIND)?;
    client.signal(Signal::USR1);
    connected(&mut client, LIMIT)?;
    stage.wait_ping(BEHIND)
}

#[test]
fn it_goes_on_to_the_next_server_and_takes_a_point_to_point_address() -> anyhow::Result<()> {
    let stage = Stage::new()?;
    let before = stage.state()?;
    let _server = stage.serve("--proto udp --topology net30")?;
    let (v4, v6) = (stage.sandbox.host(0).ipv4(), stage.sandbox.host(0).ipv6());
    // Refused at once; silent; of no such family; the server.
    let more = format!("remote {v4} 1199 udp\nremote {v4} 1194 udp6\nremote {v4} 1194 udp");
    let profile =
        stage.profile(&format!("{v6} 1199 tcp"), &format!("{more}\nconnect-timeout 2"))?;
    let (mut client, connected) = stage.connect(&profile)?;
    ensure!(connected["addresses"][0] == "10.9.0.6/32", "{connected}");
    stage.wait_ping(INSIDE)?;
    stage.wait_ping(BEHIND)?;
    client.terminate(LIMIT)?;
    ensure!(stage.state()? == before, "{before} became {}", stage.state()?);
    Ok(())
}

#[test]
fn keys_are_renewed_without_a_lost_packet() -> anyhow::Result<()> {
    let stage = Stage::new()?;
    let _server = stage.serve("--proto udp --reneg-sec 0")?;
    let remote = format!("{} 1194", stage.sandbox.host(0).ipv4());
    let (mut client, _) = stage.connect(&stage.profile(&remote, "reneg-sec 3")?)?;
    stage.wait_ping(BEHIND)?;
    let words = ["ping", "-n", "-q", "-i", "0.01", "-c", "1000", BEHIND];
    let pings = stage.near().netns().exec(&words)?.success()?;
    ensure!(pings.stdout.contains(" 0% packet loss"), "{}", pings.stdout);
    for _ in 0..2 {
        client.line_with(r#""event":"renewed""#, LIMIT)?;
    }
    Ok(())
}

#[test]
fn all_traffic_goes_through_the_tunnel_and_that_to_the_server_around_it() -> anyhow::Result<()> {
    let stage = Stage::new()?;
    let before = stage.state()?;
    stage.far().ip("addr add 192.0.2.99/32 dev lo")?;
    let _server = stage.serve("--proto udp")?;
    let remote = format!("{} 1194", stage.sandbox.host(0).ipv4());
    let more = "redirect-gateway def1";
    let (mut client, connected) = stage.connect(&stage.profile(&remote, more)?)?;
    stage.wait_ping("192.0.2.99")?;
    let device = connected["device"].as_str().context("no device")?;
    let server = stage.sandbox.host(0).ipv4();
    let way = stage.near().netns().ip(&format!("route get {server}"))?.stdout;
    ensure!(!way.contains(device), "{way}");
    client.terminate(LIMIT)?;
    ensure!(stage.state()? == before, "{before} became {}", stage.state()?);
    Ok(())
}

#[test]
fn a_wrong_password_ends_it_with_the_servers_word() -> anyhow::Result<()> {
    let stage = Stage::new()?;
    let before = stage.state()?;
    let verify = "--auth-user-pass-verify /bin/false via-env --script-security 3";
    let _server = stage.serve(&format!("--proto udp {verify}"))?;
    stage.write("login", "anna\nwrong\n")?;
    let remote = format!("{} 1194", stage.sandbox.host(0).ipv4());
    let profile = stage.profile(&remote, "auth-user-pass login")?.display().to_string();
    let ran = stage.near().weft(&["openvpn", "connect", &profile, "--json"])?;
    ensure!(ran.status.code() == Some(1), "{ran:?}");
    ensure!(ran.stderr.contains("AUTH_FAILED"), "{ran:?}");
    ensure!(ran.stdout.contains(r#""code":1"#), "{ran:?}");
    ensure!(stage.state()? == before, "something is left behind");
    // What a profile must not say is named by its line.
    let profile = stage.profile(&remote, "dev tap")?.display().to_string();
    let ran = stage.near().weft(&["openvpn", "connect", &profile])?;
    ensure!(ran.status.code() == Some(1) && ran.stderr.contains("client.ovpn:10"), "{ran:?}");
    Ok(())
}
