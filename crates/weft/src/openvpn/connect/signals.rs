//! What the user wants by a signal.

use std::io;

use tokio::signal::unix::{Signal, SignalKind, signal};

/// A wish.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Wish {
    /// To end.
    End,
    /// To connect anew.
    Reconnect,
}

/// The signals that are heard: from the start on, so that none leaves a device behind.
pub(super) struct Signals {
    terminate: Signal,
    interrupt: Signal,
    hang_up: Signal,
    user: Signal,
}

impl Signals {
    pub(super) fn new() -> io::Result<Self> {
        Ok(Self {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
            hang_up: signal(SignalKind::hangup())?,
            user: signal(SignalKind::user_defined1())?,
        })
    }

    /// The next one. Dropping the future loses nothing.
    pub(super) async fn next(&mut self) -> Wish {
        tokio::select! {
            _ = self.terminate.recv() => Wish::End,
            _ = self.interrupt.recv() => Wish::End,
            _ = self.hang_up.recv() => Wish::End,
            _ = self.user.recv() => Wish::Reconnect,
        }
    }

    /// Waits for the wish to end.
    pub(super) async fn end(&mut self) {
        while self.next().await != Wish::End {}
    }
}
