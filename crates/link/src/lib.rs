//! tokio: QUIC connections, admission, streams of control messages.
//!
//! A [`Links`] owns one UDP socket. It dials [`Target`]s and accepts other hosts. On each
//! connection it proves that both ends know the network's password or a join token, bound to that
//! TLS connection. It keeps exactly one link with each peer and reports changes as [`Event`]s.
//!
//! # One link with each peer
//!
//! Two hosts may dial each other at once, and a host may restart while the other still holds its
//! old connection. The side with the lower peer id decides. After admission it sends a numbered
//! `Use` on the connection that becomes the link; the other side follows the highest number. It
//! takes a new connection unless both sides report that they have a live one. The old connection is
//! drained, so that no message between the same two instances is lost, and then closed.
#![forbid(unsafe_code)]

mod accept;
mod admission;
mod error;
mod event;
mod gate;
mod identity;
mod known;
pub mod limits;
mod link;
mod links;
mod outbox;
mod rival;
mod secret;
mod session;
mod shared;
mod socket;
mod source;
mod status;
mod target;
mod throttle;
mod tls;
mod token;
mod wire;

pub use error::{LinkError, REASON_BAD_TOKEN, REASON_ITSELF, REASON_WRONG_PASSWORD, SendError};
pub use event::{Event, Events};
pub use identity::Identity;
pub use limits::{DEFAULT_PORT, Timing};
pub use links::{Admission, Config, Links};
pub use secret::Secret;
pub use status::{Direction, LinkState, LinkStatus};
pub use target::{KeyHash, Target};
pub use token::Token;
