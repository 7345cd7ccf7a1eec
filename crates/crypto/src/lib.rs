//! pure: SAs: seal, open, sequence numbers, replay window, key schedule; password exchange.
//!
//! No socket, file, clock or random source is used here: nonces, seeds and scalars are arguments.
#![forbid(unsafe_code)]

mod identity;
mod secret;

pub use identity::{Cipher, Format, ParsePeerIdError, PeerId};
pub use secret::{SaKey, SessionKey};
