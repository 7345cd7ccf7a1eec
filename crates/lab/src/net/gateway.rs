//! A host that serves stock OpenVPN clients, and machines outside of the network with Debian's client.

pub mod crowd;

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context, ensure};
use serde_json::Value;
use weft_bench::sandbox::{Container, Host, Netns, Running, require, try_wait_until};

use super::Lab;

/// The longest that a client takes to connect, and an effect to show.
pub const LIMIT: Duration = Duration::from_secs(40);
/// The line of a client that is connected.
pub const CONNECTED: &str = "Initialization Sequence Completed";
/// The gateway's device.
pub const DEVICE: &str = "weft-vpn";

/// Two hosts, of which the first serves, and a container of each.
pub struct Stage {
    /// The hosts.
    pub lab: Lab,
    /// A container of the first host.
    pub one: Container,
    /// A container of the second host.
    pub two: Container,
}

/// A machine outside of the network that reaches the first host.
pub struct Machine {
    /// Its namespace.
    pub netns: Netns,
    /// Of its link to the first host: 198.51.NUMBER.0/24 and 2001:db8:NUMBER::/64, the host being 1 and the machine 2.
    pub number: u8,
    /// It connects over IPv4, else over IPv6.
    pub is_ipv4: bool,
    /// It connects over TCP, else over UDP.
    pub is_tcp: bool,
}

/// A running client.
pub struct Client {
    /// The program.
    pub process: Running,
    /// Its address on the network.
    pub address: Ipv4Addr,
    /// The line with the options that it was pushed.
    pub pushed: String,
}

impl Client {
    /// The DNS server that it was told of.
    ///
    /// # Errors
    /// It was told of none.
    pub fn dns(&self) -> anyhow::Result<Ipv4Addr> {
        address_in(&self.pushed, "dhcp-option DNS ")
    }
}

/// Waits until a client is connected.
///
/// # Errors
/// It does not connect in time.
pub fn connected(mut process: Running) -> anyhow::Result<Client> {
    let pushed = connected_again(&mut process)?;
    Ok(Client { address: address_in(&pushed, "ifconfig ")?, pushed, process })
}

/// Waits until a client is connected, or once more; returns the line with the options that it was pushed.
///
/// # Errors
/// It does not connect in time.
pub fn connected_again(process: &mut Running) -> anyhow::Result<String> {
    let pushed = process.line_with("PUSH_REPLY", LIMIT)?;
    process.line_with(CONNECTED, LIMIT)?;
    Ok(pushed)
}

/// The address behind the first of these words in a line with pushed options.
///
/// # Errors
/// There is none.
pub fn address_in(pushed: &str, words: &str) -> anyhow::Result<Ipv4Addr> {
    let found = pushed.split([',', '\'']).find_map(|option| option.strip_prefix(words));
    let word = found.and_then(|rest| rest.split_whitespace().next());
    word.and_then(|word| word.parse().ok()).with_context(|| format!("no {words}in {pushed}"))
}

impl Stage {
    /// A host that serves, another host, and a container of each.
    ///
    /// # Errors
    /// A program is missing, or a step fails.
    pub fn new() -> anyhow::Result<Self> {
        require("openvpn", "openvpn")?;
        require("dig", "bind9-dnsutils")?;
        let lab = Lab::pair(&[])?;
        let (one, two) = lab.containers()?;
        let host = lab.host(0);
        let refused = host.weft(&["openvpn", "serve"])?;
        ensure!(refused.stderr.contains("weft ca init"), "{refused:?}");
        host.weft(&["ca", "init"])?.success()?;
        let served = serve(host)?;
        ensure!(served["state"] == "serving", "{served}");
        Ok(Self { lab, one, two })
    }

    /// The host that serves.
    #[must_use]
    pub fn host(&self) -> &Host {
        self.lab.host(0)
    }

    /// A machine that is linked to the first host alone.
    ///
    /// # Errors
    /// The system refuses.
    pub fn machine(&self, number: u8) -> anyhow::Result<Machine> {
        Machine::new(&self.lab, number)
    }

    /// A new profile of a host's authority, in a file.
    ///
    /// # Errors
    /// The command fails, or the file cannot be written.
    pub fn profile(&self, host: &Host, name: &str) -> anyhow::Result<PathBuf> {
        let text = host.weft(&["openvpn", "client", name])?.success()?.stdout;
        let path = self.lab.sandbox.directory().join(format!("{}-{name}.ovpn", host.index()));
        std::fs::write(&path, text)?;
        Ok(path)
    }

    /// The connected clients, as `weft status clients` shows them.
    ///
    /// # Errors
    /// The command fails.
    pub fn clients(&self) -> anyhow::Result<Vec<Value>> {
        let list = self.host().weft_json(&["status", "clients"])?;
        list.as_array().cloned().context("no list")
    }
}

/// The one-time code of now, by a program that is not ours. It needs `python3`.
///
/// # Errors
/// The text has no secret, or the program fails.
pub fn totp_code(otpauth: &str) -> anyhow::Result<String> {
    const SCRIPT: &str = "
import base64, hashlib, hmac, struct, sys
secret = base64.b32decode(sys.argv[1])
tag = hmac.new(secret, struct.pack('>Q', int(sys.argv[2]) // 30), hashlib.sha1).digest()
at = tag[-1] & 15
print('%06d' % ((struct.unpack('>I', tag[at:at + 4])[0] & 0x7fffffff) % 1000000))";
    let secret = otpauth.split(['?', '&']).find_map(|part| part.strip_prefix("secret="));
    let secret = secret.with_context(|| format!("no secret: {otpauth}"))?;
    let now = SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs().to_string();
    let output =
        std::process::Command::new("python3").args(["-c", SCRIPT, secret, &now]).output()?;
    ensure!(output.status.success(), "{output:?}");
    Ok(String::from_utf8(output.stdout)?.trim().to_owned())
}

/// Has a host serve. Clients notice within seconds that it was away.
///
/// # Errors
/// The command fails.
pub fn serve(host: &Host) -> anyhow::Result<Value> {
    Ok(host.weft_json(&["openvpn", "serve", "--ping", "1", "--ping-restart", "4"])?)
}

impl Machine {
    /// A machine that is linked to the first host of a laboratory alone, and connects over UDP and IPv4.
    ///
    /// # Errors
    /// The system refuses.
    pub fn new(lab: &Lab, number: u8) -> anyhow::Result<Self> {
        let (netns, host) = (lab.sandbox.add_netns(&format!("m{number}"))?, lab.host(0));
        let (outer, name) = (format!("m{number}"), netns.name().to_owned());
        host.netns().ip(&format!("link add {outer} type veth peer name wan netns {name}"))?;
        for (netns, device, last) in [(host.netns(), outer.as_str(), 1), (&netns, "wan", 2)] {
            netns.ip(&format!("addr add 198.51.{number}.{last}/24 dev {device}"))?;
            netns.ip(&format!("addr add 2001:db8:{number}::{last}/64 dev {device} nodad"))?;
            netns.ip(&format!("link set {device} up"))?;
        }
        Ok(Self { netns, number, is_ipv4: true, is_tcp: false })
    }

    /// The address at which it reaches the gateway.
    #[must_use]
    pub fn gateway(&self) -> IpAddr {
        match self.is_ipv4 {
            true => Ipv4Addr::new(198, 51, self.number, 1).into(),
            false => Ipv6Addr::new(0x2001, 0xdb8, self.number.into(), 0, 0, 0, 0, 1).into(),
        }
    }

    /// Starts a client.
    ///
    /// # Errors
    /// The program does not start.
    pub fn start(&self, profile: &Path) -> anyhow::Result<Running> {
        self.start_with(profile, &[])
    }

    /// Starts a client with further options.
    ///
    /// # Errors
    /// The program does not start.
    pub fn start_with(&self, profile: &Path, options: &[&str]) -> anyhow::Result<Running> {
        let remote = self.gateway().to_string();
        let proto = match (self.is_tcp, self.is_ipv4) {
            (false, true) => "udp",
            (false, false) => "udp6",
            (true, true) => "tcp-client",
            (true, false) => "tcp6-client",
        };
        let profile = profile.to_string_lossy();
        // The profile's own remote is the host's address on the underlay.
        let place = ["openvpn", "--remote", &remote, "1194", proto, "--verb", "3"];
        let words = [&place[..], &["--config", &profile, "--dev", "tun0"], options].concat();
        Ok(self.netns.spawn(&words)?)
    }

    /// Starts a client, and waits until it is connected.
    ///
    /// # Errors
    /// It does not connect in time.
    pub fn connect(&self, profile: &Path) -> anyhow::Result<Client> {
        self.connect_with(profile, &[])
    }

    /// [`Self::connect`] with further options of the client.
    ///
    /// # Errors
    /// It does not connect in time.
    pub fn connect_with(&self, profile: &Path, options: &[&str]) -> anyhow::Result<Client> {
        connected(self.start_with(profile, options)?)
    }

    /// Starts a client that is to be refused, waits until it shows this text, and ends it.
    ///
    /// # Errors
    /// It does not show it in time.
    pub fn refused(&self, profile: &Path, text: &str) -> anyhow::Result<()> {
        self.refused_with(profile, &[], text)
    }

    /// [`Self::refused`] with further options of the client.
    ///
    /// # Errors
    /// It does not show it in time.
    pub fn refused_with(&self, profile: &Path, options: &[&str], text: &str) -> anyhow::Result<()> {
        let mut client = self.start_with(profile, options)?;
        client.line_with(text, LIMIT)?;
        client.terminate(LIMIT)?;
        Ok(())
    }

    /// Whether one ping is answered.
    ///
    /// # Errors
    /// ping does not start.
    pub fn pings(&self, to: IpAddr) -> anyhow::Result<bool> {
        let to = to.to_string();
        Ok(self.netns.exec(&["ping", "-n", "-c", "1", "-W", "1", &to])?.status.success())
    }

    /// Waits for an answer to a ping.
    ///
    /// # Errors
    /// None comes in time.
    pub fn wait_ping(&self, to: IpAddr) -> anyhow::Result<()> {
        let to = to.to_string();
        try_wait_until(&format!("an answer from {to} to a client"), LIMIT, || {
            Ok(self.netns.exec(&["ping", "-n", "-c", "1", "-W", "1", &to])?.status.success())
        })?;
        Ok(())
    }
}
