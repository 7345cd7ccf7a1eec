//! The scenarios of the kernel's self-tests for its `ovpn` device (`tools/testing/selftests/net/ovpn` in
//! Linux), repeated with `weft dco`. A server is in mode mp and clients are in mode p2p; each host chooses its
//! engine.

use std::fs;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Instant;

use anyhow::Context as _;
use rustix::process::{Signal, kill_process};
use serde_json::{Value, json};
use weft_bench::sandbox::{Host, Running, Sandbox, SandboxOptions, try_wait_until};
use weft_lab::net::is_soak;

use crate::common::{
    DEVICE, LIMIT, REUSE, counted, dco, fragments, hear, holder, limit, line, listen, ping_all,
    refused, write_key_file,
};
use crate::killed::{Witness, is_left};

/// Clients of the server, hosts 1 and up. The last one's packets go over IPv6.
const CLIENTS: usize = 3;
/// The server's port; each client's is the same, and over TCP the client's number is added.
const PORT: u16 = 1_194;
/// The difference between the ids in the server's packets to a client and in the client's to the server; 0: the
/// same.
const TX_ID_STEP: usize = 9;
/// Each client's cipher.
type Ciphers = [&'static str; CLIENTS];
const AES: Ciphers = ["aes-256-gcm"; CLIENTS];
const CHACHA: Ciphers = ["chacha20-poly1305"; CLIENTS];
const EACH_ITS_OWN: Ciphers = ["aes-128-gcm", "chacha20-poly1305", "aes-192-gcm"];
/// Changes of routes while a stream goes by one of them, at least.
const ROUTE_CHANGES: usize = 200;
/// The changing routes: longer prefixes, which do not cover its address, and shorter ones.
const OTHER_ROUTES: [&str; 13] = [
    "10.99.0.128/25",
    "10.99.0.64/26",
    "10.99.0.32/27",
    "10.99.0.16/28",
    "10.99.0.8/29",
    "10.99.0.4/30",
    "10.99.0.2/31",
    "10.98.0.0/15",
    "10.96.0.0/14",
    "10.96.0.0/13",
    "10.96.0.0/12",
    "10.96.0.0/11",
    "10.64.0.0/10",
];
/// The number of no host.
const NOBODY: usize = 98;
/// The mark of the kernel's own scenario.
const MARK: &str = "1056";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Transport {
    Udp,
    Tcp,
}

/// A server, its clients, and how they speak.
struct Net {
    sandbox: Sandbox,
    transport: Transport,
    ciphers: Ciphers,
    key_files: [PathBuf; 2],
    /// As [`TX_ID_STEP`].
    tx_id_step: usize,
    /// Clients send from any address that their host has at the moment.
    is_roaming: bool,
}

impl Net {
    /// Devices and addresses, without peers; each host's own choice of an engine.
    fn new(clients: usize, transport: Transport, mtu: &str) -> anyhow::Result<Self> {
        // Even if the kernel has devices, the second client has Weft's own.
        Self::with_userspace_at(2, clients, transport, mtu)
    }

    /// As [`Self::new`], with one host whose device is in userspace even if its kernel has devices.
    fn with_userspace_at(
        userspace: usize,
        clients: usize,
        transport: Transport,
        mtu: &str,
    ) -> anyhow::Result<Self> {
        let options = SandboxOptions { hosts: clients + 1, ..SandboxOptions::default() };
        let sandbox = Sandbox::new(&options)?;
        let key_files = ["first.key", "second.key"].map(|name| sandbox.directory().join(name));
        for (seed, file) in (5..).zip(&key_files) {
            write_key_file(file, seed)?;
        }
        let (ciphers, tx_id_step, is_roaming) = (AES, TX_ID_STEP, false);
        let net = Self { sandbox, transport, ciphers, key_files, tx_id_step, is_roaming };
        for at in 0..=clients {
            let mode = if at == 0 { "mp" } else { "p2p" };
            let mut words = vec!["new-iface", DEVICE, "--mode", mode, "--mtu", mtu];
            words.extend((at == userspace).then_some("--engine=userspace"));
            dco(net.host(at), &words)?;
            // Only the tests send: no router is solicited.
            net.host(at).netns().ip(&format!("link set {DEVICE} addrgenmode none"))?;
            net.host(at).netns().ip(&format!("link set {DEVICE} up"))?;
            net.host(at).netns().ip(&format!("address add {}/24 dev {DEVICE}", inside(at)))?;
        }
        Ok(net)
    }

    fn server(&self) -> &Host {
        self.sandbox.host(0)
    }

    fn host(&self, at: usize) -> &Host {
        self.sandbox.host(at)
    }

    /// The address of a host's end of the way between the server and a client.
    fn end(&self, at: usize, client: usize) -> SocketAddr {
        let port = match self.transport {
            Transport::Udp => PORT,
            Transport::Tcp => PORT + client as u16,
        };
        let address: IpAddr = match client == CLIENTS {
            true => self.host(at).ipv6().into(),
            false => self.host(at).ipv4().into(),
        };
        SocketAddr::new(address, port)
    }

    /// Makes server and client each other's peer, with words of the test's own for the client's side.
    fn meet(&self, client: usize, more: &[&str]) -> anyhow::Result<()> {
        let ids = [self.peer(0, client), self.peer(client, client)];
        let vpn = inside(client).to_string();
        let (server_end, client_end) = (self.end(0, client), self.end(client, client));
        let ends = [server_end.to_string(), client_end.to_string()];
        let mut at_server = vec!["new-peer", DEVICE, &ids[0], "--vpn-ipv4", &vpn];
        let mut at_client = vec!["new-peer", DEVICE, &ids[1]];
        // One id for both ways need not be said twice.
        if self.tx_id_step > 0 {
            at_server.extend(["--tx-id", &ids[1]]);
            at_client.extend(["--tx-id", &ids[0]]);
        }
        match self.transport {
            Transport::Udp => {
                let at_server = [&at_server[..], &["--udp", &ends[0], "--remote", &ends[1]]];
                dco(self.server(), &at_server.concat())?;
                let any = format!("0.0.0.0:{PORT}");
                let from = if self.is_roaming { &any } else { &ends[1] };
                let at_client =
                    [&at_client[..], &["--udp", from, "--remote", &ends[0]], more].concat();
                dco(self.host(client), &at_client)?;
            }
            Transport::Tcp => thread::scope(|scope| -> anyhow::Result<()> {
                let at_server = [&at_server[..], &["--tcp-listen", &ends[0]]].concat();
                let listening = scope.spawn(move || dco(self.server(), &at_server));
                let at_client = [&at_client[..], &["--tcp-connect", &ends[0]], more].concat();
                let deadline = Instant::now() + limit();
                // At first the server does not listen yet.
                while let Err(error) = dco(self.host(client), &at_client) {
                    anyhow::ensure!(Instant::now() < deadline, "{error}");
                }
                listening.join().map_err(|_| anyhow::anyhow!("the server's side panicked"))??;
                Ok(())
            })?,
        }
        self.key(client, "primary", "0", &self.key_files[0])?;
        self.wait_carrier(client)
    }

    /// Waits until a client's device sends. It has a carrier with its peer, and a busy kernel takes seconds to begin with
    /// its queue; packets are lost meanwhile.
    fn wait_carrier(&self, client: usize) -> anyhow::Result<()> {
        let netns = self.host(client).netns();
        try_wait_until("the client's device to have a carrier", LIMIT, || {
            let shown = netns.exec(&["ip", "-j", "link", "show", DEVICE])?.success()?.json()?;
            Ok(shown[0]["operstate"] != "DOWN" && shown[0]["operstate"] != "LOWERLAYERDOWN")
        })?;
        Ok(())
    }

    /// A key on both sides.
    fn key(&self, client: usize, slot: &str, key_id: &str, file: &Path) -> anyhow::Result<()> {
        let file = file.to_string_lossy();
        for (at, side) in [(0, "server"), (client, "client")] {
            let peer = self.peer(at, client);
            let words = ["new-key", DEVICE, &peer, slot, key_id, "--side", side];
            let rest = ["--cipher", self.ciphers[client - 1], REUSE, "--key-file", &file];
            dco(self.host(at), &[&words[..], &rest].concat())?;
        }
        Ok(())
    }

    /// The server's id of a client, and the client's id of the server.
    fn peer(&self, at: usize, client: usize) -> String {
        (if at == 0 { client } else { client + self.tx_id_step }).to_string()
    }

    /// Sends 500 pings as fast as they are answered. The system counts the answers: ping's own queue has room for
    /// two dozen large ones, and fills when a slow machine lets it wait. Of the last ones some may come too late.
    fn flood(&self, from: usize, to: Ipv4Addr, size: &str) -> anyhow::Result<()> {
        let to = to.to_string();
        let words = ["ping", "-q", "-n", "-f", "-c", "500", "-s", size, &to];
        let host = self.host(from);
        let before = counted(host, "Icmp", "InEchoReps")?;
        let told = host.netns().exec_within(LIMIT * 6, &words)?.stdout;
        let each_once = told.contains("500 packets transmitted") && !told.contains("duplicates");
        anyhow::ensure!(each_once, "{words:?}: {told}");
        let have_come =
            || Ok(counted(host, "Icmp", "InEchoReps").is_ok_and(|answers| answers - before >= 498));
        try_wait_until(&format!("498 answers of 500 to {words:?}"), LIMIT, have_come)?;
        Ok(())
    }

    /// Pings a client from the server, or the server from it, and wants every answer.
    fn pings(&self, from: usize, to: Ipv4Addr, more: &[&str]) -> anyhow::Result<()> {
        let to = to.to_string();
        ping_all(self.host(from), &[&["-q", "-W", "20"], more, &[to.as_str()]].concat())
    }

    /// Waits on a host until a packet crosses the underlay whose payload begins with these bytes.
    fn watch(&self, at: usize, from: SocketAddr, first: u32) -> anyhow::Result<Running> {
        let payload = match self.transport {
            Transport::Udp => "udp[8:4]".to_owned(),
            // Behind the header of TCP and the length of the packet.
            Transport::Tcp => "tcp[(((tcp[12]&0xf0)>>2)+2):4]".to_owned(),
        };
        let filter = format!("src host {} and {payload} = {first:#010x}", from.ip());
        let words =
            ["tcpdump", "-Z", "root", "-n", "-i", "eth0", "-c", "1", "--immediate-mode", &filter];
        let mut running = self.host(at).netns().spawn(&words)?;
        running.line_with("listening on", LIMIT)?;
        Ok(running)
    }

    /// Waits until an address answers the server: a device in userspace learns of a route a moment later.
    fn wait_for(&self, behind: Ipv4Addr) -> anyhow::Result<()> {
        let deadline = Instant::now() + limit();
        while let Err(error) = self.pings(0, behind, &["-c", "1", "-W", "1"]) {
            if Instant::now() >= deadline {
                let state = self.state().unwrap_or_else(|error| error.to_string());
                return Err(error.context(state));
            }
        }
        Ok(())
    }

    /// The devices and peers of all hosts, and the server's routes.
    fn state(&self) -> anyhow::Result<String> {
        let mut shown = String::new();
        for host in self.sandbox.hosts() {
            for query in ["get-iface", "get-peer"] {
                shown +=
                    &format!("{} {query}: {}\n", host.nickname(), dco(host, &[query, DEVICE])?);
            }
        }
        Ok(shown + &self.server().netns().ip("route show")?.stdout)
    }

    /// Waits on a client's host until a packet of each direction crosses the underlay. It has the opcode, the
    /// first key's id and the id of this direction's packets.
    fn watch_ids(&self, client: usize, client_end: SocketAddr) -> anyhow::Result<[Running; 2]> {
        let word = |id: usize| 0x4800_0000 | id as u32;
        let to_server = self.watch(client, client_end, word(client))?;
        let server_end = self.end(0, client);
        Ok([to_server, self.watch(client, server_end, word(client + self.tx_id_step))?])
    }

    /// A stream from a client to the server.
    fn stream(&self, client: usize, more: &[&str]) -> anyhow::Result<()> {
        let server = self.server().netns();
        let mut serving = server.spawn(&["iperf3", "-s", "-1", "--forceflush"])?;
        serving.line_with("listening", LIMIT)?;
        let to = inside(0).to_string();
        let words = [&["iperf3", "-c", &to, "-t", "1"], more].concat();
        self.host(client).netns().exec_within(LIMIT * 6, &words)?.success()?;
        Ok(())
    }

    fn end_all(&self) -> anyhow::Result<()> {
        for host in self.sandbox.hosts() {
            dco(host, &["del-iface", DEVICE])?;
        }
        Ok(())
    }
}

/// A host's address inside.
fn inside(at: usize) -> Ipv4Addr {
    Ipv4Addr::new(10, 8, 0, at as u8 + 1)
}

/// The notification when a peer ends.
fn deleted(host: &Host, peer: usize, reason: &str) -> anyhow::Result<Value> {
    let shown = host.netns().exec(&["ip", "-j", "link", "show", DEVICE])?.success()?.json()?;
    let peer = json!({"del-reason": reason, "id": peer});
    let msg = json!({"ifindex": shown[0]["ifindex"], "peer": peer});
    Ok(json!({"name": "peer-del-ntf", "msg": msg}))
}

/// The kernel's test.sh, and test-tcp.sh, test-chachapoly.sh and test-symmetric-id.sh, which are the same
/// with another transport, another cipher and other ids.
fn whole_story(transport: Transport, ciphers: Ciphers, tx_id_step: usize) -> anyhow::Result<()> {
    story_of(&Net { ciphers, tx_id_step, ..Net::new(CLIENTS, transport, "1400")? })
}

fn story_of(net: &Net) -> anyhow::Result<()> {
    let mut told = listen(net.server())?;
    for client in 1..=CLIENTS {
        net.meet(client, &["--keepalive-interval", "60", "--keepalive-timeout", "120"])?;
    }
    // Over IPv6 the filter has no such field.
    let seen = net.watch_ids(1, net.end(1, 1))?;
    for client in 1..=CLIENTS {
        net.flood(client, inside(0), "64")?;
        net.flood(0, inside(client), "3000")?;
    }
    are_seen(seen)?;
    networks(net)?;
    for client in 1..=CLIENTS {
        net.key(client, "secondary", "1", &net.key_files[1])?;
        for at in [0, client] {
            dco(net.host(at), &["swap-keys", DEVICE, &net.peer(at, client)])?;
        }
        net.pings(client, inside(0), &["-c", "3", "-i", "0.2"])?;
    }
    questions(net)?;
    endings(net, &mut told)?;
    net.end_all()
}

/// Checks that both watched packets came.
fn are_seen(watched: [Running; 2]) -> anyhow::Result<()> {
    for mut seen in watched {
        anyhow::ensure!(seen.wait(LIMIT)?.success(), "a packet's first bytes were not seen");
    }
    Ok(())
}

/// A network behind a client, by a route of the system's, with a stream from there while other routes come and go.
/// Then it is behind another client.
fn networks(net: &Net) -> anyhow::Result<()> {
    let behind = Ipv4Addr::new(10, 99, 0, 1);
    let lo =
        |at: usize, verb| net.host(at).netns().ip(&format!("address {verb} {behind}/32 dev lo"));
    let route = |verb, client| {
        let to = format!("10.99.0.0/24 via {} dev {DEVICE}", inside(client));
        net.server().netns().ip(&format!("route {verb} {to}"))
    };
    lo(1, "add")?;
    route("add", 1)?;
    net.wait_for(behind)?;
    net.pings(0, behind, &["-c", "3", "-i", "0.2"])?;
    let before = astray(net)?;
    stream_under_changes(net, behind)?;
    let after = astray(net)?;
    anyhow::ensure!(before == after, "packets found no way, or a wrong one: {before:?}, {after:?}");
    lo(1, "del")?;
    lo(2, "add")?;
    go_astray(net, behind)?;
    route("replace", 2)?;
    net.wait_for(behind)?;
    net.pings(0, behind, &["-c", "3", "-i", "0.2"])?;
    another_table(net)
}

/// A network behind a client by a route of another table than the main one, to which a rule leads.
fn another_table(net: &Net) -> anyhow::Result<()> {
    const TABLE: u32 = 100;
    let (behind, network) = (Ipv4Addr::new(10, 98, 0, 1), "10.98.0.0/24");
    net.host(1).netns().ip(&format!("address add {behind}/32 dev lo"))?;
    let server = net.server().netns();
    server.ip(&format!("rule add to {network} lookup {TABLE}"))?;
    server.ip(&format!("route add {network} via {} dev {DEVICE} table {TABLE}", inside(1)))?;
    net.wait_for(behind)?;
    net.pings(0, behind, &["-c", "3", "-i", "0.2"])
}

/// Checks that [`astray`] counts packets to an unused address. It must also count the second client's packets
/// from an address that is still routed through the first client.
fn go_astray(net: &Net, behind: Ipv4Addr) -> anyhow::Result<()> {
    let Some(before) = astray(net)? else { return Ok(()) };
    let deadline = Instant::now() + limit();
    loop {
        let is_lost = [(0, inside(NOBODY), inside(0)), (2, inside(0), behind)].map(|way| {
            let (from, to, source) = way;
            net.pings(from, to, &["-c", "1", "-W", "1", "-I", &source.to_string()]).is_err()
        });
        anyhow::ensure!(is_lost == [true; 2], "answers of nobody, or to one who is not there");
        let after = astray(net)?.unwrap_or_default();
        if after[0] > before[0] && after[1] > before[1] {
            return Ok(());
        }
        anyhow::ensure!(Instant::now() < deadline, "not counted: {before:?}, {after:?}");
    }
}

/// Drops of a server in userspace because it found no peer, and because the source belonged to another peer.
/// `None`: the server is the kernel's, which does not count them.
fn astray(net: &Net) -> anyhow::Result<Option<[u64; 2]>> {
    let shown = dco(net.server(), &["get-iface", DEVICE])?;
    if shown["engine"] == "kernel" {
        return Ok(None);
    }
    let drops = shown["drops"].as_object().with_context(|| format!("no drops: {shown}"))?;
    // A reason is shown once there was a drop for it.
    let astray = ["no_endpoint", "foreign_source"]
        .map(|reason| drops.get(reason).and_then(Value::as_u64).unwrap_or(0));
    Ok(Some(astray))
}

/// A stream from an address behind the first client, whose route is one of many that change.
fn stream_under_changes(net: &Net, behind: Ipv4Addr) -> anyhow::Result<()> {
    let lines = |verb: &str| {
        OTHER_ROUTES.map(|to| format!("route {verb} {to} via {} dev {DEVICE}\n", inside(2)))
    };
    let file = net.sandbox.directory().join("routes");
    fs::write(&file, [lines("add"), lines("del")].concat().concat())?;
    let batch = format!("-batch {}", file.display());
    thread::scope(|scope| -> anyhow::Result<()> {
        let from = behind.to_string();
        let streaming = scope.spawn(move || net.stream(1, &["-B", &from]));
        let mut changes = 0;
        while !streaming.is_finished() || changes < ROUTE_CHANGES {
            net.server().netns().ip(&batch)?;
            changes += 2 * OTHER_ROUTES.len();
        }
        streaming.join().map_err(|_| anyhow::anyhow!("the stream panicked"))?
    })
}

/// Queries of peers and keys.
fn questions(net: &Net) -> anyhow::Result<()> {
    let all = dco(net.server(), &["get-peer", DEVICE])?;
    anyhow::ensure!(all.as_array().is_some_and(|all| all.len() == CLIENTS), "{all}");
    let one = dco(net.server(), &["get-peer", DEVICE, "2"])?;
    anyhow::ensure!(one[0]["id"] == 2 && one[0]["vpn-ipv4"] == json!(inside(2)), "{one}");
    anyhow::ensure!(one[0]["vpn-rx-packets"].as_u64() > Some(1_000), "{one}");
    anyhow::ensure!(refused(net.server(), &["get-peer", DEVICE, "20"])?.0 == Some(4));
    for (slot, key_id) in [("primary", 1), ("secondary", 0)] {
        let key = dco(net.server(), &["get-key", DEVICE, "2", slot])?;
        let cipher = net.ciphers[1];
        let name = if cipher.starts_with("aes") { "aes-gcm" } else { cipher };
        anyhow::ensure!(key["key-id"] == key_id && key["cipher-alg"] == name, "{key}");
    }
    Ok(())
}

/// Peers and keys go: by request while packets flow, and by silence in both modes.
fn endings(net: &Net, told: &mut Running) -> anyhow::Result<()> {
    let to = inside(0).to_string();
    let mut flood = net.host(1).netns().spawn(&["ping", "-q", "-f", "-w", "600", &to])?;
    dco(net.server(), &["del-peer", DEVICE, "1"])?;
    flood.terminate(LIMIT)?;
    let gone = line(told)?;
    anyhow::ensure!(gone == deleted(net.server(), 1, "userspace")?, "{gone}");
    for slot in ["primary", "secondary"] {
        dco(net.server(), &["del-key", DEVICE, "2", slot])?;
        anyhow::ensure!(refused(net.server(), &["get-key", DEVICE, "2", slot])?.0 == Some(4));
    }
    let mut told_client = listen(net.host(3))?;
    let times = ["--keepalive-interval", "3", "--keepalive-timeout", "3"];
    // Both of the third's ends go silent: neither has a key to say anything with.
    for at in [0, 3] {
        for slot in ["primary", "secondary"] {
            dco(net.host(at), &["del-key", DEVICE, &net.peer(at, 3), slot])?;
        }
    }
    for at in [0, 3] {
        dco(net.host(at), &[&["set-peer", DEVICE, &net.peer(at, 3)], &times[..]].concat())?;
    }
    let ends = [line(told)?, line(&mut told_client)?];
    let with = |reasons: [&str; 2]| -> anyhow::Result<[Value; 2]> {
        let [server, client] = reasons;
        let client = deleted(net.host(3), 3 + net.tx_id_step, client)?;
        Ok([deleted(net.server(), 3, server)?, client])
    };
    // Over TCP the end that times out first closes the connection.
    let possible = match net.transport {
        Transport::Udp => &[["expired"; 2]][..],
        Transport::Tcp => &[
            ["expired"; 2],
            ["expired", "transport-disconnect"],
            ["transport-disconnect", "expired"],
        ],
    };
    let possible: Vec<_> = possible.iter().map(|one| with(*one)).collect::<anyhow::Result<_>>()?;
    anyhow::ensure!(possible.contains(&ends), "{ends:?}");
    Ok(())
}

#[test]
fn udp() -> anyhow::Result<()> {
    whole_story(Transport::Udp, AES, TX_ID_STEP)
}

#[test]
fn tcp() -> anyhow::Result<()> {
    whole_story(Transport::Tcp, AES, TX_ID_STEP)
}

#[test]
fn chachapoly() -> anyhow::Result<()> {
    whole_story(Transport::Udp, CHACHA, TX_ID_STEP)
}

#[test]
fn symmetric_ids_and_a_cipher_for_each_client() -> anyhow::Result<()> {
    whole_story(Transport::Udp, EACH_ITS_OWN, 0)
}

#[test]
fn symmetric_ids_over_tcp_and_a_cipher_for_each_client() -> anyhow::Result<()> {
    whole_story(Transport::Tcp, EACH_ITS_OWN, 0)
}

/// The other way round than above where the kernel has devices; elsewhere all are in userspace above.
#[test]
fn a_server_in_userspace_with_clients_of_the_kernels() -> anyhow::Result<()> {
    let transports = [Transport::Udp, Transport::Tcp];
    // Over TCP the two kinds of devices meet in `vm_dco` too.
    for transport in transports.into_iter().take(if is_soak() { 2 } else { 1 }) {
        let net = Net::with_userspace_at(0, CLIENTS, transport, "1400")?;
        let shown = dco(net.host(1), &["get-iface", DEVICE])?;
        // Without such devices there is nothing here that the other tests do not tell.
        if shown["engine"] != "kernel" {
            return net.end_all();
        }
        let shown = dco(net.server(), &["get-iface", DEVICE])?;
        anyhow::ensure!(shown["engine"] == "userspace", "{shown}");
        story_of(&Net { ciphers: EACH_ITS_OWN, ..net })?;
    }
    Ok(())
}

#[test]
fn float() -> anyhow::Result<()> {
    for tx_id_step in [TX_ID_STEP, 0] {
        let net = Net { tx_id_step, is_roaming: true, ..Net::new(1, Transport::Udp, "1400")? };
        let mut told = listen(net.server())?;
        hear(net.server(), &mut told)?;
        net.meet(1, &[])?;
        net.pings(1, inside(0), &["-c", "2", "-i", "0.2"])?;
        let old = net.host(1).ipv4();
        let new = Ipv4Addr::from(old.to_bits() ^ 0x40);
        // In this order: a second address of the same network goes with the first.
        net.host(1).netns().ip(&format!("address del {old}/24 dev eth0"))?;
        net.host(1).netns().ip(&format!("address add {new}/24 dev eth0"))?;
        let seen = net.watch_ids(1, SocketAddr::from((new, PORT)))?;
        net.pings(1, inside(0), &["-c", "5", "-i", "0.2"])?;
        are_seen(seen)?;
        let floated = line(&mut told)?;
        let peer = json!({"id": 1, "remote-ipv4": new, "remote-port": PORT});
        anyhow::ensure!(floated["name"] == "peer-float-ntf", "{floated}");
        anyhow::ensure!(floated["msg"]["peer"] == peer, "{floated}");
        net.end_all()?;
    }
    Ok(())
}

/// Drops what the first client sends with the mark, and wants that to be all of it.
fn drop_marked(net: &Net) -> anyhow::Result<()> {
    let netns = net.host(1).netns();
    let rule = format!(
        "table inet marked {{ chain out {{ type filter hook output priority 0; meta mark {MARK} \
         counter drop; }}; }}"
    );
    netns.exec(&["nft", &rule])?.success()?;
    let to = inside(0).to_string();
    let lost = netns.exec(&["ping", "-q", "-c", "3", "-i", "0.2", "-W", "1", &to])?;
    anyhow::ensure!(lost.stdout.contains("100% packet loss"), "{}", lost.stdout);
    let rules = netns.exec(&["nft", "list", "table", "inet", "marked"])?.success()?.stdout;
    anyhow::ensure!(!rules.contains("packets 0 "), "{rules}");
    netns.exec(&["nft", "delete", "table", "inet", "marked"])?.success()?;
    Ok(())
}

#[test]
fn mark() -> anyhow::Result<()> {
    for transport in [Transport::Udp, Transport::Tcp] {
        let net = Net::new(1, transport, "1400")?;
        net.meet(1, &["--mark", MARK])?;
        net.pings(1, inside(0), &["-c", "2", "-i", "0.2"])?;
        drop_marked(&net)?;
        net.pings(1, inside(0), &["-c", "2", "-i", "0.2"])?;
        net.end_all()?;
    }
    Ok(())
}

#[test]
fn a_refused_peer_leaves_the_mark_of_a_shared_socket() -> anyhow::Result<()> {
    let net = Net::new(1, Transport::Udp, "1400")?;
    net.meet(1, &["--mark", MARK])?;
    // Nothing says where it is.
    let shared = net.end(1, 1).to_string();
    let words = ["new-peer", DEVICE, "50", "--udp", &shared, "--mark", "7"];
    let nowhere = refused(net.host(1), &words)?;
    anyhow::ensure!(nowhere.0 == Some(2), "{nowhere:?}");
    drop_marked(&net)?;
    net.pings(1, inside(0), &["-c", "2", "-i", "0.2"])?;
    net.end_all()
}

#[test]
fn large_mtu() -> anyhow::Result<()> {
    for transport in [Transport::Udp, Transport::Tcp] {
        let net = Net::new(1, transport, "1500")?;
        net.meet(1, &[])?;
        let before = fragments(net.server())?;
        // The longest packets that the device takes: sealed, they are longer than the link's MTU.
        net.pings(1, inside(0), &["-c", "5", "-i", "0.2", "-s", "1472", "-M", "do"])?;
        net.pings(0, inside(1), &["-c", "5", "-i", "0.2", "-s", "1472", "-M", "do"])?;
        let after = fragments(net.server())?;
        let is_cut = before != after;
        anyhow::ensure!(is_cut == (transport == Transport::Udp), "{before:?}, {after:?}");
        net.stream(1, &[])?;
        net.end_all()?;
    }
    Ok(())
}

#[test]
fn set_peer() -> anyhow::Result<()> {
    let net = Net::new(1, Transport::Udp, "1400")?;
    net.meet(1, &[])?;
    net.pings(1, inside(0), &["-c", "2", "-i", "0.2"])?;
    let other = inside(21);
    let nobody = SocketAddr::from((Ipv4Addr::from(net.host(1).ipv4().to_bits() ^ 0x40), 9));
    let (vpn_ipv4, remote) = (other.to_string(), nobody.to_string());
    let set = |words: &[&str]| dco(net.server(), &[&["set-peer", DEVICE, "1"], words].concat());
    let peer = || dco(net.server(), &["get-peer", DEVICE, "1"]).map(|peers| peers[0].clone());
    set(&["--remote", &remote, "--tx-id", "77"])?;
    set(&["--vpn-ipv4", &vpn_ipv4, "--vpn-ipv6", "fd08::22"])?;
    let shown = peer()?;
    for (what, value) in [
        ("remote-ipv4", json!(nobody.ip())),
        ("remote-port", json!(nobody.port())),
        ("tx-id", json!(77)),
        ("vpn-ipv4", json!(other)),
        ("vpn-ipv6", json!("fd08::22")),
    ] {
        anyhow::ensure!(shown[what] == value, "{what}: {shown}");
    }
    // The client is heard of from where it is, and by its other address inside alone.
    net.host(1).netns().ip(&format!("address add {other}/24 dev {DEVICE}"))?;
    set(&["--tx-id", &net.peer(1, 1)])?;
    net.pings(1, inside(0), &["-c", "2", "-i", "0.2", "-I", &vpn_ipv4])?;
    anyhow::ensure!(peer()?["remote-ipv4"] == json!(net.host(1).ipv4()), "{}", peer()?);
    net.pings(0, other, &["-c", "2", "-i", "0.2"])?;
    let old = inside(1).to_string();
    let foreign = net.pings(1, inside(0), &["-c", "1", "-W", "1", "-I", &old]);
    anyhow::ensure!(foreign.is_err(), "from an address that is not the peer's any more");
    net.end_all()
}

#[test]
fn close_socket() -> anyhow::Result<()> {
    for transport in [Transport::Udp, Transport::Tcp] {
        let net = Net::new(1, transport, "1400")?;
        let client = net.host(1);
        let mut told = listen(net.server())?;
        hear(net.server(), &mut told)?;
        net.meet(1, &["--keepalive-interval", "1", "--keepalive-timeout", "60"])?;
        net.pings(1, inside(0), &["-c", "2", "-i", "0.2"])?;
        // Over a connection, the kernel learns of its end as it sends.
        let times = ["--keepalive-interval", "1", "--keepalive-timeout", "4"];
        dco(net.server(), &[&["set-peer", DEVICE, "1"], &times[..]].concat())?;
        let witness = Witness::of(client)?;
        // No other process has the client's socket.
        kill_process(holder(client)?, Signal::KILL)?;
        let over = line(&mut told)?;
        // A connection that is closed before all was read from it is reset.
        let reasons = match transport {
            Transport::Udp => &["expired"][..],
            Transport::Tcp => &["transport-disconnect", "transport-error"],
        };
        let possible = reasons.iter().map(|reason| deleted(net.server(), 1, reason));
        let possible: Vec<Value> = possible.collect::<anyhow::Result<_>>()?;
        anyhow::ensure!(possible.contains(&over), "{transport:?}: {over}");
        is_left(client, witness, 1 + net.tx_id_step as u32)?;
        net.end_all()?;
    }
    Ok(())
}
