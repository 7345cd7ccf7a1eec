//! What the process that holds a device is asked, as JSON.

use serde::{Deserialize, Serialize};
use weft_openvpn::device::Slot;

use super::args::{Carrier, KeyWords, PeerWords};

/// `POST /v1/dco`; the answer is the verb's.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(tag = "verb", rename_all = "kebab-case")]
pub(crate) enum Request {
    /// The device: name, ifindex, engine, and where it is one in userspace what it dropped.
    Show,
    NewPeer {
        peer: PeerWords,
        carrier: Carrier,
        mark: Option<u32>,
    },
    SetPeer {
        peer: PeerWords,
    },
    GetPeer {
        id: Option<u32>,
    },
    DelPeer {
        id: u32,
    },
    NewKey {
        key: KeyWords,
    },
    GetKey {
        peer: u32,
        slot: Slot,
    },
    SwapKeys {
        peer: u32,
    },
    DelKey {
        peer: u32,
        slot: Slot,
    },
    Packet {
        peer: u32,
        bytes: Vec<u8>,
    },
    /// Remove the device and end.
    End,
}
