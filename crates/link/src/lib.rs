//! tokio: QUIC connections, admission, streams of control messages.
#![forbid(unsafe_code)]
