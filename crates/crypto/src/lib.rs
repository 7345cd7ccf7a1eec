//! pure: SAs and keys of OpenVPN's data channel: seal, open, sequence numbers, replay window, key
//! schedule; password exchange.
//!
//! No socket, file, clock or random source is used here: nonces, seeds and scalars are arguments.
#![forbid(unsafe_code)]

mod aead;
mod cpace;
mod identity;
mod library;
pub mod ovpn;
mod sa;
mod schedule;
mod secret;
#[cfg(test)]
mod testing;
mod window;

pub use cpace::{
    CPACE_SHARE_LEN, CPACE_TAG_LEN, CpaceContext, CpaceError, CpaceInitiator, CpaceKey,
    CpaceResponder, CpaceSecret, Initiator, Responder,
};
pub use identity::{
    Cipher, DataCipher, Format, ParsePeerIdError, PeerId, TUNNEL_PREFIX, TunnelEnd, TunnelWay,
    fingerprint,
};
pub use library::{Choice, Library, SizeClass, prefer, preferred, preferred_for_data};
pub use sa::{
    ESP_HEADER_LEN, ESP_ICV_LEN, OpenError, OpeningKey, OpeningSa, Reserved, SealError, SealingSa,
};
pub use schedule::derive_sa_key;
pub use secret::{EpochSecret, SaKey, SessionKey};
pub use window::{Replay, ReplayWindow, WINDOW_PACKETS};
