//! `weft dco`: a data channel device driven by hand, the kernel's `ovpn` device or the one in userspace,
//! with one set of verbs (`docs/design/ovpn.md`).
//!
//! A process holds each device with its sockets, answers the verbs over a unix socket in the runtime
//! directory, and reports events. It knows nothing of certificates or sessions: the negotiating program
//! provides the keys.

mod args;
mod follow;
mod held;
mod holder;
mod json;
mod lines;
mod peers;
mod requests;
mod sockets;
mod task;
mod used_keys;
mod verbs;
mod words;

pub use args::{Carrier, CipherWord, KeyWords, PeerWords, SideWord};
pub use args::{DcoCommand, Engine};
pub use requests::{DeviceCall, Request};
pub(crate) use task::OwnedTask;
pub use verbs::ask_all;
pub(crate) use verbs::run;
