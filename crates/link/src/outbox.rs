//! Messages waiting to be sent to one peer. They survive a replacement of the connection.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;

use crate::limits::{OUTBOX_MAX_BYTES, OUTBOX_MAX_MESSAGES};

#[derive(Default)]
pub(crate) struct Outbox {
    queue: Mutex<Queue>,
    filled: Notify,
}

#[derive(Default)]
struct Queue {
    messages: VecDeque<Vec<u8>>,
    bytes: usize,
}

impl Outbox {
    /// Adds a message; returns false if there is no room.
    pub(crate) fn push(&self, message: Vec<u8>) -> bool {
        let mut queue = self.lock();
        let bytes = queue.bytes + message.len();
        if queue.messages.len() >= OUTBOX_MAX_MESSAGES || bytes > OUTBOX_MAX_BYTES {
            return false;
        }
        queue.bytes = bytes;
        queue.messages.push_back(message);
        drop(queue);
        self.filled.notify_one();
        true
    }

    pub(crate) fn pop(&self) -> Option<Vec<u8>> {
        let mut queue = self.lock();
        let message = queue.messages.pop_front()?;
        queue.bytes -= message.len();
        Some(message)
    }

    /// Waits until there may be something to pop. Cancel safe.
    pub(crate) async fn filled(&self) {
        self.filled.notified().await;
    }

    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_bounded_in_messages_and_in_bytes() {
        let outbox = Outbox::default();
        for _ in 0..OUTBOX_MAX_MESSAGES {
            assert!(outbox.push(vec![1]));
        }
        assert!(!outbox.push(vec![1]));
        assert_eq!(outbox.pop(), Some(vec![1]));
        assert!(outbox.push(vec![1]));

        let outbox = Outbox::default();
        assert!(outbox.push(vec![0; OUTBOX_MAX_BYTES]));
        assert!(!outbox.push(vec![0]));
        assert!(outbox.pop().is_some());
        assert!(outbox.push(vec![0]));
    }
}
