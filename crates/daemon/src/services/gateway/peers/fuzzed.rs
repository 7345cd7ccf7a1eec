//! The fuzz target for what other gateways say, and what a host does meanwhile.

use std::collections::{BTreeMap, BTreeSet};

use weft_api::{ApiError, ErrorKind};
use weft_crypto::PeerId;
use zeroize::Zeroizing;

use super::Key;
use super::documents::{Content, DOCUMENT_MAX_BYTES, Documents};
use super::exchange::{Exchange, Output};
use super::homes::Replica;
use super::message::{Answered, Message, Serves};

const DOCUMENTS: &[&str] = &["authority", "users"];
const NETWORK: &str = "weft";
const FINGERPRINT: &str = "f";
/// The most outputs of one line, besides those of its items.
const OUTPUTS_MAX: usize = 64;

/// Input: lines. The first byte of each says what happens, the second is the number of another host, where one is
/// meant:
///
/// - `+`, `-`, `?`: its link is up, is down, has lost messages. `m`: it sends the message that follows as JSON.
/// - `>`: this host hands it the authority.
/// - `H`, `N`: this host has an authority, or serves with that of a home. `w`: it wants one. `s`: it serves.
/// - `g`, `i`, `o`, `r`: a client of the name that follows is given an address, is let in, leaves, is revoked.
/// - `n`: documents cannot be taken from now on.
///
/// # Panics
/// A property does not hold: messages for hosts that are not linked, or that cannot be read, or without end; documents
/// that are not what was announced; addresses that no client can have.
pub fn gateway_peers(data: &[u8]) {
    let mut host = Host::new();
    for line in data.split(|byte| *byte == b'\n') {
        host.handle(line);
        host.check(line.len());
    }
}

fn id(number: u8) -> PeerId {
    PeerId::from_bytes([number; 32])
}

fn document() -> Content {
    Content(Zeroizing::new("ä".repeat(33_000)))
}

struct Host {
    exchange: Exchange,
    linked: BTreeSet<PeerId>,
    epochs: BTreeMap<String, u32>,
    takes: bool,
    ticks: u64,
}

impl Host {
    fn new() -> Self {
        Self {
            exchange: Exchange::new(id(b'0'), DOCUMENTS, None, (Vec::new(), Vec::new())),
            linked: BTreeSet::new(),
            epochs: BTreeMap::new(),
            takes: true,
            ticks: 0,
        }
    }

    fn handle(&mut self, line: &[u8]) {
        let [what, rest @ ..] = line else { return };
        let (peer, text) = match rest {
            [number, text @ ..] => (id(*number), text),
            [] => (id(b'1'), rest),
        };
        self.ticks += 1;
        let name = String::from_utf8_lossy(rest).into_owned();
        let key: Key = (NETWORK.to_owned(), name.clone());
        match what {
            b'+' => {
                self.linked.insert(peer);
                self.exchange.handle_link_up(peer, "host".to_owned());
            }
            b'-' => {
                self.linked.remove(&peer);
                self.exchange.handle_link_down(peer, self.ticks);
            }
            b'?' if self.linked.contains(&peer) => self.exchange.handle_lost(peer),
            b'm' => {
                if let Ok(message) = serde_json::from_slice::<Message>(text) {
                    self.exchange.handle_message(peer, message);
                }
            }
            b'>' => _ = self.exchange.hand(peer, 7, document()),
            b'H' => {
                let all = DOCUMENTS.iter().map(|name| ((*name).to_owned(), document()));
                let documents = Documents::new(FINGERPRINT.to_owned(), all.collect());
                self.exchange.set_home(Some(documents));
            }
            b'N' => {
                self.exchange.set_home(None);
                self.exchange.follow(Replica {
                    fingerprint: FINGERPRINT.to_owned(),
                    home: peer,
                    nickname: "host".to_owned(),
                    versions: BTreeMap::new(),
                    as_of: 0,
                });
            }
            b'w' => self.exchange.want_authority(None),
            b's' => {
                let network = NETWORK.to_owned();
                let by = FINGERPRINT.to_owned();
                let serves = Serves { network, remotes: vec![name], is_serving: true, by };
                self.exchange.set_serves(Some(serves));
            }
            b'g' => {
                let before = self.exchange.addresses(&key);
                let address = [10, 32, 0, self.ticks as u8].into();
                self.exchange.give(key, vec![address], before.as_ref(), self.ticks);
            }
            b'i' => self.exchange.let_in(name, self.ticks),
            b'o' => self.exchange.left(&name),
            b'r' => {
                *self.epochs.entry(name).or_default() += 1;
                self.exchange.set_revocations(self.epochs.clone());
            }
            b'n' => self.takes = false,
            _ => {}
        }
    }

    /// Carries out what is asked for, as the service does.
    fn check(&mut self, bytes: usize) {
        // The shortest item of a message has more bytes than it leads to outputs.
        let mut left = OUTPUTS_MAX + bytes;
        while let Some(output) = self.exchange.poll_output() {
            left = left.checked_sub(1).expect("outputs without end");
            match output {
                Output::Send { peer, message } => {
                    assert!(self.linked.contains(&peer), "a message for a host without link");
                    let text = serde_json::to_string(&message).expect("a message is JSON");
                    let again: Message = serde_json::from_str(&text).expect("it can be read");
                    assert_eq!(again, message);
                }
                Output::Take(taken) => {
                    assert!(taken.content.0.len() <= DOCUMENT_MAX_BYTES, "a long document");
                    assert_eq!(taken.content.version(), taken.version);
                    self.exchange.handle_taken(&taken, self.takes, self.ticks);
                }
                Output::Handed { peer, id, .. } | Output::Requested { peer, id, .. } => {
                    let error = ApiError::new(ErrorKind::Conflict, "no");
                    self.exchange.answer(peer, id, Answered::Refused(error));
                }
                Output::End { .. }
                | Output::Readdress { .. }
                | Output::Release { .. }
                | Output::Save
                | Output::Codes(_)
                | Output::Answered { .. } => {}
            }
        }
        for mapping in self.exchange.mappings() {
            assert!((1..=2).contains(&mapping.addresses.len()), "{mapping:?}");
        }
        let _ = (self.exchange.conflicts(), self.exchange.home(), self.exchange.is_told());
    }
}
