//! A peer may name, or show by its packets, only its own address as a destination, never another
//! member's.
#![allow(clippy::unwrap_used)]

use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use weft_crypto::{PeerId, SessionKey};
use weft_path::{
    Config, EngineCommand, EngineEvent, EngineKind, EngineOffer, Message, MessageError, PathId,
    Paths,
};

const HONEST: [u8; 4] = [192, 0, 2, 1];
const LIAR: [u8; 4] = [192, 0, 2, 2];
const VICTIM: [u8; 4] = [192, 0, 2, 3];

struct Two {
    now: Instant,
    honest: Paths,
    liar: Paths,
    ids: [PeerId; 2],
    /// Destinations that the honest host's engine was told to send to.
    sent_to: Vec<(PathId, SocketAddr)>,
    refused: Vec<MessageError>,
    asked: usize,
}

fn two() -> Two {
    let now = Instant::now();
    let ids = [PeerId::from_bytes([1; 32]), PeerId::from_bytes([2; 32])];
    let config = || Config {
        engines: vec![EngineOffer {
            kind: EngineKind::Kernel,
            port: 6785,
            ..Config::default().engines.remove(0)
        }],
        ..Config::default()
    };
    let [mut honest, mut liar] =
        [0, 1].map(|index| Paths::new(ids[index], config(), [index as u8 + 1; 32]));
    let key = || SessionKey::from_bytes([7; 32]);
    let [a, b]: [IpAddr; 2] = [HONEST.into(), LIAR.into()];
    honest.handle_link_up(now, ids[1], key(), Some(a), b, true);
    liar.handle_link_up(now, ids[0], key(), Some(b), a, false);
    Two { now, honest, liar, ids, sent_to: Vec::new(), refused: Vec::new(), asked: 0 }
}

impl Two {
    /// Lets the hosts talk; the liar's offers name this address.
    fn talk(&mut self, offered: Option<IpAddr>) {
        for _ in 0..50 {
            while let Some(command) = self.honest.poll_command() {
                if let EngineCommand::InstallOutbound { path, remote, .. }
                | EngineCommand::SetRemote { path, remote } = command
                {
                    self.sent_to.push((path, remote));
                }
            }
            while self.liar.poll_command().is_some() {}
            while let Some((_, message)) = self.honest.poll_message() {
                self.asked += usize::from(matches!(message, Message::RekeyRequest(_)));
                let _ = self.liar.handle_message(self.now, self.ids[0], message);
            }
            while let Some((_, mut message)) = self.liar.poll_message() {
                if let Message::Offer(offer) = &mut message {
                    offer.address = offered;
                }
                let result = self.honest.handle_message(self.now, self.ids[1], message);
                self.refused.extend(result.err());
            }
            self.now += Duration::from_millis(20);
            self.honest.handle_timeout(self.now);
            self.liar.handle_timeout(self.now);
        }
    }
}

#[test]
fn an_offer_of_another_members_address_is_refused_for_what_the_kernel_seals_by_address() {
    let mut two = two();
    two.talk(Some(VICTIM.into()));
    assert!(two.refused.contains(&MessageError::ForeignAddress), "{:?}", two.refused);
    assert_eq!(two.sent_to, []);
    let mut honest = self::two();
    honest.talk(Some(LIAR.into()));
    assert!(!honest.sent_to.is_empty(), "its own address is its own");
}

#[test]
fn packets_from_another_members_address_move_no_policy_but_a_nats_port_does() {
    let mut two = two();
    two.talk(None);
    let (path, remote) = two.sent_to.first().copied().unwrap();
    assert_eq!(remote.ip(), IpAddr::from(LIAR));
    for (from, moved) in [((VICTIM, 6785).into(), false), ((LIAR, 40_000).into(), true)] {
        (two.sent_to, two.asked) = (Vec::new(), 0);
        two.honest.handle_event(two.now, EngineEvent::RemoteMoved { path, remote: from });
        two.talk(None);
        assert_eq!(two.asked > 0, moved, "from {from}");
        assert_eq!(two.sent_to.iter().any(|(_, to)| *to == from), moved, "from {from}");
    }
}
