//! The rows of other tunnels, host to host: a program on each host that makes a device and carries its
//! packets to the other, encrypted.

use std::fs::File;
use std::time::Duration;

use super::ends::{End, Ends, Ready};
use super::install::LeftOut;
use super::others::Outside;
use super::rows::{
    BORINGTUN, FASTD, GOTATUN, N2N, NEBULA, QUICKTUN, Row, TINC, VPNCLOUD, WIREGUARD_GO,
    WIREGUARD_GO_TAILSCALE, YGGDRASIL,
};
use super::{debian, nebula, vpncloud, wireguard};
use crate::sandbox::{Running, Sandbox, SandboxError, last_lines, try_wait_until, wait_until};

/// The link's MTU less that of a device: wireguard-go's own default on it, 1420 on 1500. The others get as
/// much, so that all send equal packets.
const OVERHEAD_BYTES: u32 = 80;
/// For a device that takes any MTU.
const MTU_ANY: u32 = u32::MAX;
/// Limit of the wait for a device, and then for the other end.
const UP_LIMIT: Duration = Duration::from_secs(30);
/// Limit of one command that looks at a device or sets it up.
const LOOK_LIMIT: Duration = Duration::from_secs(10);
/// The most lines of a log that a reason quotes.
const LOG_LINES_MAX: usize = 4;

/// The properties of a tunnel.
pub(super) struct Tunnel {
    row: &'static str,
    device: &'static str,
    /// Third byte of the benchmark addresses inside.
    subnet: u8,
    /// The largest MTU of its device, bytes.
    mtu_max: u32,
    /// Finds the program, makes keys and writes each end's files.
    prepare: fn(&Ends<'_>) -> Result<Ready, LeftOut>,
    /// A description of the setup, for the report.
    setup: &'static str,
}

const TUNNELS: [Tunnel; 11] = [
    Tunnel {
        row: WIREGUARD_GO,
        device: "weftwg",
        subnet: 1,
        mtu_max: MTU_ANY,
        prepare: wireguard::wireguard_go,
        setup: "wireguard-go (newest by `go install`) on each host, host to host, its default MTU",
    },
    Tunnel {
        row: WIREGUARD_GO_TAILSCALE,
        device: "weftwgts",
        subnet: 9,
        mtu_max: MTU_ANY,
        prepare: wireguard::tailscale,
        setup: "Tailscale's fork of wireguard-go (`go install`) on each host, host to host, \
                wireguard-go's default MTU",
    },
    Tunnel {
        row: NEBULA,
        device: "weftnebula",
        subnet: 16,
        mtu_max: MTU_ANY,
        prepare: nebula::prepare,
        setup: "nebula (`go install`) on each host, host to host: udp_offloads, use_offloads, two \
                routines, cipher aes",
    },
    Tunnel {
        row: BORINGTUN,
        device: "weftbt",
        subnet: 10,
        mtu_max: MTU_ANY,
        prepare: wireguard::boringtun,
        setup: "boringtun-cli (`cargo install`) on each host, host to host, its 4 threads",
    },
    Tunnel {
        row: GOTATUN,
        device: "weftgt",
        subnet: 11,
        // Its buffers have 4,096 bytes.
        mtu_max: 4_000,
        prepare: wireguard::gotatun,
        setup: "gotatun-cli (`cargo install`) on each host, host to host",
    },
    Tunnel {
        row: VPNCLOUD,
        device: "weftcloud",
        subnet: 4,
        mtu_max: MTU_ANY,
        prepare: vpncloud::prepare,
        setup: "vpncloud (`cargo install vpncloud`) on each host, host to host: type tun, AES-256",
    },
    Tunnel {
        row: FASTD,
        device: "weftfastd",
        subnet: 13,
        mtu_max: MTU_ANY,
        prepare: debian::fastd,
        setup: "fastd from the distribution on each host, host to host: mode tun, salsa2012+umac",
    },
    Tunnel {
        row: TINC,
        device: "wefttinc",
        subnet: 12,
        // It is built for Ethernet frames of 1,518 bytes.
        mtu_max: 1_500,
        prepare: debian::tinc,
        setup: "tinc from the distribution on each host, host to host: mode router, aes-256-cbc, \
                sha1, PMTUDiscovery no (it would begin over TCP)",
    },
    Tunnel {
        row: QUICKTUN,
        device: "weftquick",
        subnet: 14,
        // Longer packets never arrive.
        mtu_max: 1_500,
        prepare: debian::quicktun,
        setup: "quicktun from the distribution on each host, host to host: mode tun, nacltai",
    },
    Tunnel {
        row: N2N,
        device: "weftn2n",
        subnet: 15,
        // Its default: it adds 136 bytes, and its buffers have 2,048.
        mtu_max: 1_400,
        prepare: debian::n2n,
        setup: "n2n from the distribution on each host, host to host, its default MTU, twofish; its \
                supernode on the second",
    },
    Tunnel {
        row: YGGDRASIL,
        device: "weftygg",
        // Yggdrasil brings its addresses.
        subnet: 0,
        mtu_max: MTU_ANY,
        prepare: debian::yggdrasil,
        setup: "yggdrasil from the distribution on each host, peers over TCP, its default MTU",
    },
];

/// Whether a row is one of these.
#[must_use]
pub fn is_tunnel(row: &str) -> bool {
    TUNNELS.iter().any(|tunnel| tunnel.row == row)
}

/// Another tunnel between the hosts, without containers (which spares it a bridge). A tunnel that does not
/// come up, as another version may not, is [`Outside::Missing`].
#[must_use]
pub fn tunnel(sandbox: &Sandbox, row: &str, link_mtu: u32) -> Outside {
    let Some(tunnel) = TUNNELS.iter().find(|tunnel| tunnel.row == row) else {
        return Outside::Missing(format!("{row} is no row of a tunnel"));
    };
    let mtu = link_mtu.saturating_sub(OVERHEAD_BYTES).min(tunnel.mtu_max);
    let Tunnel { row, device, subnet, .. } = *tunnel;
    Ends { sandbox, row, device, subnet, mtu }.stand(tunnel).unwrap_or_else(Outside::from)
}

impl Ends<'_> {
    fn stand(&self, tunnel: &Tunnel) -> Result<Outside, LeftOut> {
        let Tunnel { row, device, setup, .. } = *tunnel;
        let ready = (tunnel.prepare)(self)?;
        let beside = match ready.beside.is_empty() {
            true => None,
            false => Some(self.start(1, &ready.beside, "beside.log")?),
        };
        let mut processes = vec![self.bring_up(0, &ready)?, self.bring_up(1, &ready)?];
        let daemons = processes.iter().map(Running::pid).collect();
        processes.extend(beside);
        let address = ready.own_address.unwrap_or_else(|| self.end(0).inner[1].into());
        let target = address.to_string();
        let reached =
            wait_until(&format!("the ends of {row} to reach each other"), UP_LIMIT, || {
                let ping = ["ping", "-n", "-c", "1", "-W", "1", &target];
                self.netns(0).exec(&ping).is_ok_and(|output| output.status.success())
            });
        reached.map_err(|error| self.quoted(0, &error))?;
        let links = self.netns(0).ip(&format!("-j link show dev {device}"))?.json()?;
        let mtu = links[0]["mtu"].as_u64().and_then(|mtu| u32::try_from(mtu).ok());
        let row = Box::new(Row {
            name: row,
            client: self.netns(0).clone(),
            server: self.netns(1).clone(),
            server_address: address,
            mtu: mtu.ok_or("`ip -j link show` names no MTU")?,
            daemons,
            setup: setup.to_owned(),
            _processes: processes,
        });
        Ok(Outside::Row { row, version: ready.version.unwrap_or_else(|| "unknown".to_owned()) })
    }

    /// Starts one end and waits until its device is there and set.
    fn bring_up(&self, index: usize, ready: &Ready) -> Result<Running, LeftOut> {
        let mut process = self.start(index, &ready.commands[index], "log")?;
        let mut refusal = None;
        let what = format!("the device of {}", self.row);
        let up = try_wait_until(&what, UP_LIMIT, || {
            if let Some(status) = process.ended()? {
                return Err(SandboxError::CommandFailed {
                    command: self.row.to_owned(),
                    status: status.to_string(),
                    message: self.said(index),
                });
            }
            refusal = self.set_up_device(index, ready).err();
            Ok(refusal.is_none())
        });
        match (up, refusal) {
            (Ok(_), _) => Ok(process),
            (Err(SandboxError::WaitTimedOut { .. }), Some(refusal)) => {
                Err(self.quoted(index, &refusal))
            }
            (Err(error), _) => Err(error.into()),
        }
    }

    fn start(&self, index: usize, words: &[String], log: &str) -> Result<Running, SandboxError> {
        let path = self.file(index, log);
        let log =
            File::create(&path).map_err(SandboxError::io(format!("make {}", path.display())))?;
        self.netns(index).spawn_logged(&as_strs(words), &log)
    }

    fn set_up_device(&self, index: usize, ready: &Ready) -> Result<(), SandboxError> {
        let netns = self.netns(index);
        let End { device, mtu, inner: [own, _], .. } = self.end(index);
        netns.ip(&format!("link show dev {device}"))?;
        if !ready.configure[index].is_empty() {
            netns.exec_within(LOOK_LIMIT, &as_strs(&ready.configure[index]))?.success()?;
        }
        if ready.own_address.is_none() {
            netns.ip(&format!("address replace {own}/24 dev {device}"))?;
            netns.ip(&format!("link set {device} mtu {mtu} up"))?;
        }
        Ok(())
    }

    /// An error with the end of one end's log.
    fn quoted(&self, index: usize, error: &SandboxError) -> LeftOut {
        match self.said(index).as_str() {
            "" => error.to_string().into(),
            said => format!("{error}: {said}").into(),
        }
    }

    /// The last lines of one end's log.
    fn said(&self, index: usize) -> String {
        let log = std::fs::read_to_string(self.file(index, "log")).unwrap_or_default();
        last_lines(&log, LOG_LINES_MAX)
    }
}

fn as_strs(words: &[String]) -> Vec<&str> {
    words.iter().map(String::as_str).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::super::rows;
    use super::*;

    #[test]
    fn tunnels_share_no_name_device_or_address() {
        let of = |pick: fn(&Tunnel) -> String| TUNNELS.iter().map(pick).collect::<BTreeSet<_>>();
        assert_eq!(of(|tunnel| tunnel.row.to_owned()).len(), TUNNELS.len());
        assert_eq!(of(|tunnel| tunnel.device.to_owned()).len(), TUNNELS.len());
        assert_eq!(of(|tunnel| tunnel.subnet.to_string()).len(), TUNNELS.len());
        // Linux limits a device's name to 15 bytes.
        assert!(TUNNELS.iter().all(|tunnel| tunnel.device.len() < 16));
        assert!(TUNNELS.iter().all(|tunnel| rows::ALL.contains(&tunnel.row)));
    }
}
