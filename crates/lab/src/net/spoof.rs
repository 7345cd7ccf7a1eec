//! A container that sends under addresses which are not its own.

use std::net::{Ipv4Addr, Ipv6Addr};
use std::time::{Duration, Instant};

use weft_bench::sandbox::Container;
use weft_io::namespace::{Namespace, run_in};
use weft_io::packet::PacketSocket;
use weft_packet::arp::{self, Arp};
use weft_packet::{ethernet, icmp, ipv4, ipv6};
use weft_path::Mac;

use super::devices::mac;
use super::namespace;

/// How long the last frame may take.
const SETTLE: Duration = Duration::from_secs(15);
/// What spoofed frames contain.
const SPOOFED: &[u8] = b"under another's address";
/// What the last frame contains, which the container may send.
const LAST: &[u8] = b"under its own address";
const UDP: u8 = 17;
const ICMPV6: u8 = 58;

fn framed(to: [u8; 6], from: [u8; 6], ethertype: u16, payload: &[u8]) -> Vec<u8> {
    let mut frame = vec![0; ethernet::LEN];
    ethernet::write(&mut frame, to, from, ethertype);
    frame.extend(payload);
    frame
}

/// A datagram from a port, to all.
fn datagram(source: Ipv4Addr, port: u16, text: &[u8]) -> Vec<u8> {
    let length = (8 + text.len()) as u16;
    let header = ipv4::Builder {
        tos: 0,
        total_len: ipv4::LEN as u16 + length,
        id: 0,
        dont_fragment: true,
        ttl: 64,
        protocol: UDP,
        source,
        destination: Ipv4Addr::BROADCAST,
    };
    let mut packet = vec![0; ipv4::LEN];
    header.write(&mut packet);
    for word in [port, 4_000, length, 0] {
        packet.extend(word.to_be_bytes());
    }
    packet.extend(text);
    packet
}

/// A message of ICMPv6 to all hosts, with a target, and the text behind it.
fn message(source: Ipv6Addr, kind: u8, target: Ipv6Addr) -> Vec<u8> {
    let destination = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 1);
    let mut body = [&[0; 8][..], &target.octets(), SPOOFED].concat();
    icmp::finish_v6(&mut body, kind, 0, 0x2000_0000, source, destination);
    let header = ipv6::Builder {
        traffic_class: 0,
        flow_label: 0,
        payload_len: body.len() as u16,
        next_header: ICMPV6,
        hop_limit: 255,
        source,
        destination,
    };
    let mut packet = vec![0; ipv6::LEN];
    header.write(&mut packet);
    [packet, body].concat()
}

/// A container that spoofs, and one whose addresses it takes.
#[derive(Debug)]
pub struct Spoofer<'a> {
    container: &'a Container,
    mac: [u8; 6],
    own: (Ipv4Addr, Ipv6Addr),
    victim: (Ipv4Addr, Ipv6Addr),
    victim_mac: [u8; 6],
}

impl<'a> Spoofer<'a> {
    /// Reads the addresses of both.
    ///
    /// # Errors
    /// One of them has none.
    pub fn new(container: &'a Container, victim: &Container) -> anyhow::Result<Self> {
        Ok(Self {
            container,
            mac: mac(container)?,
            own: (container.ipv4()?, container.ipv6()?),
            victim: (victim.ipv4()?, victim.ipv6()?),
            victim_mac: mac(victim)?,
        })
    }

    /// A frame for each reason that the lock has, to a container.
    #[must_use]
    pub fn frames(&self, to: [u8; 6]) -> Vec<(&'static str, Vec<u8>)> {
        let (own4, own6) = self.own;
        let (victim4, victim6) = self.victim;
        let link_local = Mac(self.mac).link_local();
        let of = |ethertype, packet: &[u8]| framed(to, self.mac, ethertype, packet);
        let v4 = |packet: &[u8]| of(ethernet::TYPE_IPV4, packet);
        let v6 = |packet: &[u8]| of(ethernet::TYPE_IPV6, packet);
        let mut claim = vec![0; arp::LEN];
        let (operation, target_mac) = (arp::REPLY, to);
        let (sender_mac, sender_ip, target_ip) = (self.mac, victim4, Ipv4Addr::BROADCAST);
        Arp { operation, sender_mac, sender_ip, target_mac, target_ip }.write(&mut claim);
        claim.extend(SPOOFED);
        let tag = [&[0, 0, 8, 0][..], &datagram(victim4, 4_000, SPOOFED)].concat();
        let under = |mac, packet: &[u8]| framed(to, mac, ethernet::TYPE_IPV4, packet);
        vec![
            ("mac", under(self.victim_mac, &datagram(victim4, 4_000, SPOOFED))),
            ("mac", under([2, 9, 9, 9, 9, 9], &datagram(own4, 4_000, SPOOFED))),
            ("ip", v4(&datagram(victim4, 4_000, SPOOFED))),
            ("ip", v6(&message(victim6, 128, victim6))),
            ("dhcp", v4(&datagram(own4, 67, SPOOFED))),
            ("arp", of(ethernet::TYPE_ARP, &claim)),
            ("nd", v6(&message(own6, 136, victim6))),
            ("router", v6(&message(link_local, 134, own6))),
            ("router", v6(&message(link_local, 137, own6))),
            ("vlan", of(0x8100, &tag)),
        ]
    }

    /// Sends all frames to each container, and to all. Returns the reasons for which they should be dropped.
    ///
    /// # Errors
    /// One arrives.
    pub fn reach_nobody(&self, victims: &[&Container]) -> anyhow::Result<Vec<&'static str>> {
        let mut sent = Vec::new();
        for to in victims {
            for destination in [mac(to)?, ethernet::BROADCAST] {
                let (reasons, frames): (Vec<_>, Vec<_>) =
                    self.frames(destination).into_iter().unzip();
                let arrived = self.arriving(to, &frames)?;
                anyhow::ensure!(arrived == 0, "{arrived} frames reach {}", to.netns().name());
                sent.extend(reasons);
            }
        }
        Ok(sent)
    }

    fn send(&self, frames: &[Vec<u8>]) -> anyhow::Result<()> {
        run_in(Namespace::open(&namespace(self.container))?, || -> anyhow::Result<()> {
            let sender = PacketSocket::sender()?;
            let device = sender.index_of("weft0")?;
            for frame in frames {
                sender.send(frame, device)?;
            }
            Ok(())
        })?
    }

    /// Sends frames to a container, then one that it may send. Returns how many of the first arrive.
    ///
    /// # Errors
    /// The last one does not arrive.
    pub fn arriving(&self, to: &Container, frames: &[Vec<u8>]) -> anyhow::Result<usize> {
        const ALL: u16 = 3;
        let receiver = run_in(Namespace::open(&namespace(to))?, || {
            let device = PacketSocket::sender()?.index_of("weft0")?;
            Ok::<_, anyhow::Error>(PacketSocket::open_for(device, ALL)?)
        })??;
        self.send(frames)?;
        let last =
            framed(mac(to)?, self.mac, ethernet::TYPE_IPV4, &datagram(self.own.0, 4_000, LAST));
        let (begun, mut arrived, mut buffer) = (Instant::now(), 0, [0; 2_048]);
        while begun.elapsed() < SETTLE {
            self.send(std::slice::from_ref(&last))?;
            std::thread::sleep(Duration::from_millis(50));
            let mut is_last = false;
            while let Ok(length) = receiver.recv(&mut buffer) {
                let frame = buffer.get(..length).unwrap_or_default();
                arrived += usize::from(frame.ends_with(SPOOFED));
                is_last |= frame.ends_with(LAST);
            }
            if is_last {
                return Ok(arrived);
            }
        }
        anyhow::bail!("the last frame does not arrive")
    }
}
