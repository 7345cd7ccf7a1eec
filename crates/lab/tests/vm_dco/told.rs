//! The output of `weft dco listen` for a device of the kernel and for one in userspace, under the same events.
//! The text is the same line by line, except for the index that the system gives the device. The only
//! difference is a connection closed by the far end. The kernel's device notices at its next send, the one in
//! userspace at once.
//!
//! A key whose packet ids are used up is in `packet_ids.rs`.

use std::io::Write;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::thread;
use std::time::Duration;

use weft_bench::sandbox::{Host, Running, Sandbox, SandboxOptions};
use weft_io::namespace::{Namespace, run_in};

use crate::common::{DEVICE, REUSE, dco, hear_by, listen, write_key_file};

/// The port of a peer's other end is its id behind this.
const CONNECTIONS: u16 = 1_200;
const ENGINES: [&str; 2] = ["--engine=kernel", "--engine=userspace"];
/// Limit for a line, or for the end of a listener.
const SOON: Duration = Duration::from_secs(10);
/// After this long without a line, none is on its way.
const QUIET: Duration = Duration::from_secs(1);
/// Peers that do not exist, over each address family.
const NOBODY: [[&str; 4]; 2] = [
    ["--udp", "127.0.0.1:1194", "--remote", "127.0.0.1:9"],
    ["--udp", "[::1]:1194", "--remote", "[::1]:9"],
];
/// Ends a silent peer soon.
const IMPATIENT: [&str; 4] = ["--keepalive-interval", "1", "--keepalive-timeout", "3"];
/// Keeps a peer, and finds out soon that a connection has ended.
const PATIENT: [&str; 4] = ["--keepalive-interval", "1", "--keepalive-timeout", "120"];

/// A device that is listened to, and the host at the other end.
struct Stage {
    sandbox: Sandbox,
    mode: &'static str,
    listening: Running,
    told: Vec<String>,
}

impl Stage {
    fn new(engine: &str, mode: &'static str) -> anyhow::Result<Self> {
        let sandbox = Sandbox::new(&SandboxOptions { hosts: 2, ..SandboxOptions::default() })?;
        let here = sandbox.host(0);
        dco(here, &["new-iface", DEVICE, "--mode", mode, engine])?;
        set_up(here, 1)?;
        let mut listening = listen(here)?;
        let vpn: &[&str] = if mode == "mp" { &["--vpn-ipv4", "10.8.99.99"] } else { &[] };
        hear_by(here, &mut listening, vpn)?;
        Ok(Self { sandbox, mode, listening, told: Vec::new() })
    }

    fn here(&self) -> &Host {
        self.sandbox.host(0)
    }

    fn there(&self) -> &Host {
        self.sandbox.host(1)
    }

    fn dco(&self, words: &[&str]) -> anyhow::Result<()> {
        dco(self.here(), words).map(|_| ())
    }

    /// Makes a peer of the device.
    fn meet(&self, peer: &str, words: &[&[&str]]) -> anyhow::Result<()> {
        let vpn = format!("10.8.0.{peer}");
        let mut all = vec!["new-peer", DEVICE, peer];
        all.extend(["--vpn-ipv4", &vpn].iter().filter(|_| self.mode == "mp"));
        self.dco(&[all, words.concat()].concat())
    }

    /// Gives a peer of a host's device a key.
    fn key(&self, at: usize, peer: &str, slot: &str, key_id: &str) -> anyhow::Result<()> {
        let side = ["server", "client"][at];
        let file = self.sandbox.directory().join("static.key");
        write_key_file(&file, 7)?;
        let file = file.to_string_lossy();
        let words =
            ["new-key", DEVICE, peer, slot, key_id, "--side", side, REUSE, "--key-file", &file];
        dco(self.sandbox.host(at), &words)?;
        Ok(())
    }

    /// Waits until the device tells something.
    fn tells(&mut self) -> anyhow::Result<()> {
        self.told.push(self.listening.line(SOON)?);
        Ok(())
    }

    /// Makes a peer over a connection whose far end is the test's, and gives it a key.
    fn connect(&self, peer: &str, words: &[&str]) -> anyhow::Result<TcpStream> {
        let space = Namespace::open(Path::new(&self.there().netns().path()))?;
        // Notices of control packets include its address.
        let at = (self.there().ipv4(), CONNECTIONS + peer.parse::<u16>()?);
        let listener = run_in(&space, || TcpListener::bind(at))??;
        let to = listener.local_addr()?.to_string();
        self.meet(peer, &[&["--tcp-connect", &to], words])?;
        self.key(0, peer, "primary", "0")?;
        Ok(listener.accept()?.0)
    }

    /// Makes the other host a peer that sends from any address it has at the moment.
    fn has_roaming_peer(&self, ends: [IpAddr; 2]) -> anyhow::Result<()> {
        let [here, there] = ends.map(|end| SocketAddr::new(end, 1_194).to_string());
        self.meet("2", &[&["--udp", &here, "--remote", &there]])?;
        let any = if ends[0].is_ipv4() { "0.0.0.0:1194" } else { "[::]:1194" };
        dco(self.there(), &["new-iface", DEVICE, "--engine=userspace"])?;
        set_up(self.there(), 2)?;
        dco(self.there(), &["new-peer", DEVICE, "2", "--udp", any, "--remote", &here])?;
        (0..2).try_for_each(|at| self.key(at, "2", "primary", "0"))
    }

    /// Every one of the other host's pings is answered.
    fn is_pinged(&self) -> anyhow::Result<()> {
        let words = ["ping", "-q", "-c", "3", "-i", "0.2", "-W", "20", "10.8.0.1"];
        let told = self.there().netns().exec(&words)?.stdout;
        anyhow::ensure!(told.contains(" 3 received"), "{told}");
        Ok(())
    }

    /// Removes the device. Returns all its lines, without the device's index.
    fn ends(mut self) -> anyhow::Result<Vec<String>> {
        let shown = self.here().netns().exec(&["ip", "-j", "link", "show", DEVICE])?;
        let index = shown.success()?.json()?[0]["ifindex"].to_string();
        self.dco(&["del-iface", DEVICE])?;
        anyhow::ensure!(self.listening.wait(SOON)?.success(), "who listens has not ended well");
        while let Ok(line) = self.listening.line(QUIET) {
            self.told.push(line);
        }
        let own = format!("\"ifindex\":{index},");
        let its = |line: &String| line.replacen(&own, "\"ifindex\":ITS,", 1);
        Ok(self.told.iter().map(its).collect())
    }
}

/// Switches a host's device on.
fn set_up(host: &Host, number: usize) -> anyhow::Result<()> {
    // Only the tests send: no router is solicited.
    host.netns().ip(&format!("link set {DEVICE} addrgenmode none"))?;
    host.netns().ip(&format!("link set {DEVICE} up"))?;
    host.netns().ip(&format!("address add 10.8.0.{number}/24 dev {DEVICE}"))?;
    Ok(())
}

/// Plays a scene with a device of this kind. Returns all its lines.
fn play(
    engine: &str,
    mode: &'static str,
    scene: impl Fn(&mut Stage) -> anyhow::Result<()>,
) -> anyhow::Result<Vec<String>> {
    let mut stage = Stage::new(engine, mode)?;
    scene(&mut stage)?;
    let told = stage.ends()?;
    println!("{engine}: {told:#?}");
    Ok(told)
}

/// Plays a scene with each kind of device; both must print the same lines, this many.
fn alike(
    mode: &'static str,
    lines: usize,
    scene: impl Fn(&mut Stage) -> anyhow::Result<()> + Sync,
) -> anyhow::Result<()> {
    // Beside each other, since most of a scene is waiting.
    let [kernels, userspaces] = thread::scope(|all| {
        let played = |engine| play(engine, mode, &scene);
        let kernels = all.spawn(move || played(ENGINES[0]));
        let userspaces = played(ENGINES[1]);
        anyhow::Ok([kernels.join().expect("a scene returns its errors")?, userspaces?])
    })?;
    anyhow::ensure!(kernels == userspaces, "not alike: {kernels:#?}, {userspaces:#?}");
    anyhow::ensure!(kernels.len() == lines, "{lines} lines were to come: {kernels:#?}");
    anyhow::ensure!(kernels.iter().all(|line| line.contains("ITS")), "{kernels:#?}");
    Ok(())
}

#[test]
fn of_peers_that_are_deleted_and_of_one_that_the_device_takes_along() -> anyhow::Result<()> {
    alike("mp", 4, |stage| {
        for peer in ["1", "2", "3", "4"] {
            stage.meet(peer, &[&NOBODY[0]])?;
        }
        for peer in ["3", "1", "4"] {
            stage.dco(&["del-peer", DEVICE, peer])?;
        }
        Ok(())
    })
}

#[test]
fn of_the_only_peer_that_another_takes_the_place_of() -> anyhow::Result<()> {
    alike("p2p", 4, |stage| {
        stage.meet("1", &[&NOBODY[0]])?;
        stage.meet("2", &[&NOBODY[0]])?;
        // Itself, elsewhere.
        stage.meet("2", &[&NOBODY[1]])?;
        stage.dco(&["del-peer", DEVICE, "2"])?;
        stage.meet("3", &[&NOBODY[0]])
    })
}

#[test]
fn of_peers_that_nothing_is_heard_of() -> anyhow::Result<()> {
    alike("mp", 3, |stage| {
        for (peer, nobody) in ["1", "2"].into_iter().zip(NOBODY) {
            stage.meet(peer, &[&nobody, &IMPATIENT])?;
            stage.tells()?;
        }
        let _silent = stage.connect("3", &IMPATIENT)?;
        stage.tells()
    })?;
    alike("p2p", 1, |stage| {
        stage.meet("1", &[&NOBODY[0], &IMPATIENT])?;
        stage.tells()
    })
}

#[test]
fn of_a_peer_that_floats_there_and_back() -> anyhow::Result<()> {
    alike("mp", 3, |stage| {
        let old = stage.there().ipv4();
        let new = Ipv4Addr::from_bits(old.to_bits() ^ 0x40);
        stage.has_roaming_peer([stage.here().ipv4().into(), old.into()])?;
        stage.is_pinged()?;
        for (from, to) in [(old, new), (new, old)] {
            // In this order: a second address of the same network goes with the first.
            stage.there().netns().ip(&format!("address del {from}/24 dev eth0"))?;
            stage.there().netns().ip(&format!("address add {to}/24 dev eth0"))?;
            stage.is_pinged()?;
            stage.tells()?;
        }
        Ok(())
    })?;
    alike("p2p", 2, |stage| {
        let old = stage.there().ipv6();
        let new = Ipv6Addr::from_bits(old.to_bits() ^ 0x40);
        stage.has_roaming_peer([stage.here().ipv6().into(), old.into()])?;
        stage.is_pinged()?;
        stage.there().netns().ip(&format!("address del {old}/64 dev eth0"))?;
        stage.there().netns().ip(&format!("address add {new}/64 dev eth0 nodad"))?;
        stage.is_pinged()?;
        stage.tells()
    })
}

#[test]
fn of_keys_that_come_and_go_nothing() -> anyhow::Result<()> {
    alike("mp", 1, |stage| {
        stage.has_roaming_peer([stage.here().ipv4().into(), stage.there().ipv4().into()])?;
        stage.is_pinged()?;
        for at in 0..2 {
            stage.key(at, "2", "secondary", "1")?;
        }
        for host in [stage.here(), stage.there()] {
            dco(host, &["swap-keys", DEVICE, "2"])?;
        }
        stage.is_pinged()?;
        for slot in ["secondary", "primary"] {
            stage.dco(&["del-key", DEVICE, "2", slot])?;
        }
        thread::sleep(QUIET);
        Ok(())
    })
}

#[test]
fn of_connections_that_carry_nonsense() -> anyhow::Result<()> {
    // Data of the first version, which has no peer ids; an empty packet.
    const NONSENSE: [&[u8]; 2] = [&[0, 5, 0x30, 0, 0, 0, 1], &[0, 0]];
    alike("mp", 2 * NONSENSE.len() + 1, |stage| {
        for (peer, nonsense) in ["1", "2"].into_iter().zip(NONSENSE) {
            let mut other = stage.connect(peer, &PATIENT)?;
            // A packet of the control channel.
            other.write_all(&[0, 5, 0x20, 1, 2, 3, 4])?;
            stage.tells()?;
            other.write_all(nonsense)?;
            stage.tells()?;
        }
        stage.meet("3", &[&NOBODY[0]])
    })
}

#[test]
fn of_connections_that_the_other_end_closes() -> anyhow::Result<()> {
    let scene = |stage: &mut Stage| {
        let other = stage.connect("1", &PATIENT)?;
        drop(other);
        stage.tells()
    };
    for (engine, reason) in ENGINES.into_iter().zip(["transport-error", "transport-disconnect"]) {
        let peer = format!(r#"{{"del-reason":"{reason}","id":1}}"#);
        let line = format!(r#"{{"msg":{{"ifindex":ITS,"peer":{peer}}},"name":"peer-del-ntf"}}"#);
        let told = play(engine, "mp", scene)?;
        anyhow::ensure!(told == [line], "not so: {told:#?}");
    }
    Ok(())
}
