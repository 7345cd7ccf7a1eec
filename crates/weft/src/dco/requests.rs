//! Requests to the process that holds a device, as JSON.

use serde::{Deserialize, Serialize};
use serde_json::Value;
use weft_api::Call;
use weft_api::call::Method;
use weft_openvpn::device::Slot;

use super::args::{Carrier, KeyWords, PeerWords};

/// `POST /v1/dco`: a [`Request`], and the verb's answer.
#[derive(Clone, Copy, Debug)]
pub struct DeviceCall;

impl Call for DeviceCall {
    const METHOD: Method = Method::Post;
    const PATH: &'static str = "/v1/dco";
    type Request = Request;
    type Answer = Value;
}

/// A verb and its words.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(tag = "verb", rename_all = "kebab-case")]
pub enum Request {
    /// The device: name, ifindex, engine, and drop counters if it is one in userspace.
    Show,
    /// Adds a peer.
    NewPeer {
        /// The peer.
        peer: PeerWords,
        /// The transport of its packets.
        carrier: Carrier,
        /// The mark of its packets.
        mark: Option<u32>,
    },
    /// Changes a peer.
    SetPeer {
        /// The peer.
        peer: PeerWords,
    },
    /// Shows one peer, or all.
    GetPeer {
        /// Its id; all peers if there is none.
        id: Option<u32>,
    },
    /// Removes a peer.
    DelPeer {
        /// Its id.
        id: u32,
    },
    /// Gives a peer a key.
    NewKey {
        /// The key.
        key: KeyWords,
    },
    /// Shows a key's state.
    GetKey {
        /// The peer's id.
        peer: u32,
        /// The slot of the key.
        slot: Slot,
    },
    /// Exchanges a peer's primary and secondary key.
    SwapKeys {
        /// The peer's id.
        peer: u32,
    },
    /// Deletes a key of a peer.
    DelKey {
        /// The peer's id.
        peer: u32,
        /// The slot of the key.
        slot: Slot,
    },
    /// Sends a packet of the control channel to a peer.
    Packet {
        /// The peer's id.
        peer: u32,
        /// The packet, without a header.
        bytes: Vec<u8>,
    },
    /// Remove the device and end.
    End,
}
