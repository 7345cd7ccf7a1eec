//! Tests of the kernel's offloads at start (reference: kernels 6.6.44 and 7.0 to 7.1.4 had broken ones).

use std::fmt;
use std::io::{self, IoSlice};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::Duration;

use crate::IoError;
use crate::poller::Poller;
use crate::tap::{Tap, TapOptions, VNET_LEN};
use crate::udp::{RUN_SEGMENTS_MAX, RUN_SEGMENTS_MIN, RecvBatch, UdpSocket};

/// How long the self-test waits for a datagram on loopback, in milliseconds.
pub const LOOP_TIMEOUT_MS: u64 = 500;

/// Bytes of one datagram of the self-test's runs; odd, so that a wrong offset shows.
const PROBE_SEGMENT: usize = 333;
/// Datagrams in its first run.
const PROBE_SEGMENTS: usize = 5;

/// The first kernel that takes a UDP super-packet, written to a device, through a tunnel behind it. On older
/// kernels, a container with a VXLAN or Geneve device on the network loses tunnelled datagrams as soon as two
/// come together. Reference: Tailscale's issue 11026, by way of Linux 6.8.4 and 6.8.5.
const TUNNELS_TAKE_USO: [u32; 3] = [6, 8, 5];

/// The result of trying one offload.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Tried, and right to the last byte.
    Works,
    /// The kernel does not have it.
    Absent,
    /// The kernel says it has it, and does it wrongly; it is not used.
    Broken(String),
    /// It could not be tried; it is used until a call fails.
    Untested(String),
}

impl Verdict {
    /// Whether the engine begins with it.
    pub const fn usable(&self) -> bool {
        matches!(self, Self::Works | Self::Untested(_))
    }
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Works => f.write_str("works"),
            Self::Absent => f.write_str("absent"),
            Self::Broken(why) => write!(f, "broken ({why})"),
            Self::Untested(why) => write!(f, "untested ({why})"),
        }
    }
}

/// The offloads of this host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Offloads {
    /// TCP super-packets to and from a TAP device.
    pub tap_tso: Verdict,
    /// UDP super-packets to a TAP device (Linux 6.8.5). Those from it are taken wherever the kernel
    /// gives them (Linux 6.2).
    pub tap_uso: Verdict,
    /// Sending a run in one call (UDP_SEGMENT).
    pub udp_segment: Verdict,
    /// Receiving a run in one call (UDP_GRO).
    pub udp_gro: Verdict,
    /// Datagrams that one run may have.
    pub run_segments_max: usize,
}

impl Offloads {
    /// None at all, whatever the kernel has.
    pub const NONE: Self = Self {
        tap_tso: Verdict::Absent,
        tap_uso: Verdict::Absent,
        udp_segment: Verdict::Absent,
        udp_gro: Verdict::Absent,
        run_segments_max: 1,
    };
}

impl fmt::Display for Offloads {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { tap_tso, tap_uso, udp_segment, udp_gro, run_segments_max } = self;
        write!(
            f,
            "tap-tso {tap_tso}, tap-uso {tap_uso}, udp-segment {udp_segment}, udp-gro {udp_gro}, \
             {run_segments_max} datagrams a run"
        )
    }
}

/// Tries all offloads: on a temporary TAP device, which is never up, and on loopback.
///
/// # Errors
/// As [`Tap::open`]: without a TAP device there is no engine.
pub fn self_test() -> Result<Offloads, IoError> {
    let (tap_tso, tap_uso) = try_tap()?;
    let (udp_segment, udp_gro, run_segments_max) = try_udp();
    Ok(Offloads { tap_tso, tap_uso, udp_segment, udp_gro, run_segments_max })
}

fn try_tap() -> Result<(Verdict, Verdict), IoError> {
    let tap = Tap::open(&TapOptions::new("weftprobe%d"))?;
    let granted = tap.offloads();
    let verdict = |granted: bool, vnet: [u8; VNET_LEN], frame: &[u8]| {
        if granted { try_write(&tap, vnet, frame) } else { Verdict::Absent }
    };
    let tso = verdict(granted.tso, vnet(1, TCP_HEADERS, 100, 34, 16), &frame(6, TCP_HEADERS, 200));
    let uso = verdict(granted.uso, vnet(5, UDP_HEADERS, 100, 34, 6), &frame(17, UDP_HEADERS, 200));
    let release = rustix::system::uname().release().to_string_lossy().into_owned();
    Ok((tso, through_tunnels(uso, kernel_version(&release))))
}

/// The verdict on writing UDP super-packets, once tunnels inside containers are thought of. A kernel that
/// does not tell its version is taken for a new one.
fn through_tunnels(verdict: Verdict, kernel: Option<[u32; 3]>) -> Verdict {
    if verdict.usable() && kernel.is_some_and(|kernel| kernel < TUNNELS_TAKE_USO) {
        return Verdict::Broken(
            "tunnels in containers lose them on kernels before Linux 6.8.5".to_owned(),
        );
    }
    verdict
}

/// The version that a kernel's release (`uname -r`) begins with, such as 6.8.0 of `6.8.0-31-generic`; a
/// number that is not there is 0. It does not show patches that a distributor has added or reverted.
pub fn kernel_version(release: &str) -> Option<[u32; 3]> {
    let other = |c: char| !c.is_ascii_digit() && c != '.';
    let numbers = release.split(other).next()?;
    let mut version = [0; 3];
    for (place, number) in version.iter_mut().zip(numbers.split('.')) {
        *place = number.parse().ok()?;
    }
    Some(version)
}

/// Ethernet, IPv4 and TCP headers.
const TCP_HEADERS: u16 = 14 + 20 + 20;
/// Ethernet, IPv4 and UDP headers.
const UDP_HEADERS: u16 = 14 + 20 + 8;

/// Writes a super-packet to a device that is down: EIO tells that the kernel has taken the header
/// and only then found the device down. A header that no kernel may take must fail otherwise, or
/// the answer means nothing.
fn try_write(tap: &Tap, vnet: [u8; VNET_LEN], frame: &[u8]) -> Verdict {
    let write = |vnet: &[u8]| match tap.send(&[IoSlice::new(vnet), IoSlice::new(frame)]) {
        Ok(_) => None,
        Err(error) => error.raw_os_error(),
    };
    let mut impossible = vnet;
    impossible[1] = 0x55;
    if write(&impossible) != Some(libc::EINVAL) {
        return Verdict::Untested("the device takes any header".to_owned());
    }
    match write(&vnet) {
        None | Some(libc::EIO) => Verdict::Works,
        Some(error) => Verdict::Broken(io::Error::from_raw_os_error(error).to_string()),
    }
}

/// A header with a partial checksum.
fn vnet(kind: u8, headers: u16, segment: u16, start: u16, offset: u16) -> [u8; VNET_LEN] {
    let [h, s, c, o] = [headers, segment, start, offset].map(u16::to_le_bytes);
    [1, kind, h[0], h[1], s[0], s[1], c[0], c[1], o[0], o[1]]
}

/// An IPv4 super-packet from and to addresses that no host has (RFC 5737).
fn frame(protocol: u8, headers: u16, payload: u16) -> Vec<u8> {
    let mut frame = vec![0; usize::from(headers + payload)];
    frame[..14].copy_from_slice(&[2, 0, 0, 0, 0, 2, 2, 0, 0, 0, 0, 1, 8, 0]);
    frame[14] = 0x45;
    frame[16..18].copy_from_slice(&(headers - 14 + payload).to_be_bytes());
    frame[22] = 64;
    frame[23] = protocol;
    frame[26..34].copy_from_slice(&[192, 0, 2, 1, 192, 0, 2, 2]);
    match protocol {
        6 => (frame[46], frame[47]) = (0x50, 0x10),
        _ => frame[38..40].copy_from_slice(&(8 + payload).to_be_bytes()),
    }
    frame
}

/// UDP_SEGMENT, UDP_GRO, and how long a run may be.
fn try_udp() -> (Verdict, Verdict, usize) {
    let untested = |error: &dyn fmt::Display| {
        let verdict = Verdict::Untested(error.to_string());
        (verdict.clone(), verdict, RUN_SEGMENTS_MIN)
    };
    let bind = || UdpSocket::bind(Some(Ipv4Addr::LOCALHOST.into()), 0);
    let (from, to) = match (bind(), bind()) {
        (Ok(from), Ok(to)) => (from, to),
        (Err(error), _) | (_, Err(error)) => return untested(&error),
    };
    if let Err(error) = exchange(&from, &to, 1) {
        return untested(&format!("no datagram arrived over loopback: {error}"));
    }
    let gro = |messages: usize| match (to.gro(), messages) {
        (false, _) => Verdict::Absent,
        (true, 1) => Verdict::Works,
        (true, _) => Verdict::Untested("loopback split the run".to_owned()),
    };
    match exchange(&from, &to, PROBE_SEGMENTS) {
        Ok(messages) => {
            let long = exchange(&from, &to, RUN_SEGMENTS_MAX).is_ok();
            let longest = if long { RUN_SEGMENTS_MAX } else { RUN_SEGMENTS_MIN };
            (Verdict::Works, gro(messages), longest)
        }
        Err(error) if matches!(error.raw_os_error(), Some(libc::EINVAL | libc::EIO)) => {
            (Verdict::Absent, gro(0), 1)
        }
        Err(error) => (Verdict::Broken(error.to_string()), gro(0), 1),
    }
}

/// Sends a run and compares the arriving bytes; returns how many messages it took.
fn exchange(from: &UdpSocket, to: &UdpSocket, segments: usize) -> io::Result<usize> {
    let last = PROBE_SEGMENT / 3;
    let run: Vec<u8> =
        (0..(segments - 1) * PROBE_SEGMENT + last).map(|at| (at * 7 + at / 256) as u8).collect();
    let address = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), to.port());
    let mut poller = Poller::new()?;
    poller.add(to, 0)?;
    from.send_run(&run, PROBE_SEGMENT, &from.remote(address)?)?;
    let mut batch = RecvBatch::new();
    let (mut got, mut messages) = (0, 0);
    while got < run.len() {
        if poller.wait(Some(Duration::from_millis(LOOP_TIMEOUT_MS)))?.count() == 0 {
            return Err(io::ErrorKind::TimedOut.into());
        }
        for index in 0..to.recv(&mut batch, segments)? {
            let Some(message) = batch.message(index) else { break };
            if message.source.port() != from.port() {
                continue;
            }
            for datagram in batch.buffer()[message.range].chunks(message.segment) {
                let expected = &run[got..run.len().min(got + PROBE_SEGMENT)];
                if datagram != expected {
                    return Err(io::Error::other("a run arrived changed"));
                }
                got += datagram.len();
            }
            messages += 1;
        }
    }
    Ok(messages)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use crate::namespace::run_in;
    use crate::testing::fresh_namespace;

    #[test]
    fn this_machine_has_all_offloads() {
        let offloads = self_test().expect("this test needs root and /dev/net/tun");
        for verdict in [&offloads.tap_tso, &offloads.tap_uso, &offloads.udp_segment] {
            assert_eq!(*verdict, Verdict::Works, "{offloads}");
        }
        assert_eq!(offloads.udp_gro, Verdict::Works, "{offloads}");
        assert!(offloads.run_segments_max >= RUN_SEGMENTS_MIN);
    }

    #[test]
    fn without_loopback_udp_is_untested_and_used() {
        let offloads = run_in(fresh_namespace(), self_test).unwrap().unwrap();
        assert_eq!(offloads.tap_tso, Verdict::Works, "{offloads}");
        assert!(matches!(offloads.udp_segment, Verdict::Untested(_)), "{offloads}");
        assert!(offloads.udp_segment.usable());
    }

    #[test]
    fn a_super_packet_the_kernel_does_not_take_is_broken() {
        let tap = Tap::open(&TapOptions::new("weftbad%d")).unwrap();
        // USO with the checksum field of TCP: refused by every kernel.
        let bad = vnet(5, UDP_HEADERS, 100, 34, 16);
        let verdict = try_write(&tap, bad, &frame(17, UDP_HEADERS, 200));
        assert!(matches!(verdict, Verdict::Broken(_)), "{verdict}");
    }

    #[test]
    fn a_kernels_version_is_what_its_release_begins_with() {
        for (release, version) in [
            ("6.18.44-fc-v669", [6, 18, 44]),
            ("6.8.0-31-generic", [6, 8, 0]),
            ("7.3.4+deb13-cloud-amd64", [7, 3, 4]),
            ("5.14.0.1", [5, 14, 0]),
            ("7.1-rc2", [7, 1, 0]),
        ] {
            assert_eq!(kernel_version(release), Some(version), "{release}");
        }
        for nothing in ["", "unknown", "v6.8.5", "6.", "6..5", "6.8.4294967296"] {
            assert_eq!(kernel_version(nothing), None, "{nothing}");
        }
    }

    #[test]
    fn udp_super_packets_are_written_only_where_tunnels_take_them() {
        let verdict = |release| through_tunnels(Verdict::Works, kernel_version(release));
        for old in ["6.2.0", "6.6.9", "6.8.0-31-generic", "6.8.4-060804-generic"] {
            assert!(matches!(verdict(old), Verdict::Broken(_)), "{old}");
        }
        for new in ["6.8.5-060805-generic", "6.9-rc1", "6.12.6-amd64", "7.0.0", "unknown"] {
            assert_eq!(verdict(new), Verdict::Works, "{new}");
        }
        let without = kernel_version("6.1.0-18-amd64");
        assert_eq!(through_tunnels(Verdict::Absent, without), Verdict::Absent);
    }

    #[test]
    fn a_changed_run_is_noticed() {
        let bind = || UdpSocket::bind(Some(Ipv4Addr::LOCALHOST.into()), 0).unwrap();
        let (from, to) = (bind(), bind());
        let stray = from.remote(SocketAddr::new(Ipv4Addr::LOCALHOST.into(), to.port())).unwrap();
        from.send_run(b"not the run", 11, &stray).unwrap();
        assert!(exchange(&from, &to, 5).is_err());
    }
}
