//! Messages in the stream that TLS gives: each ends with a NUL.

use std::fmt;

use zeroize::{Zeroize, Zeroizing};

/// The longest message, in bytes: a record of TLS. OpenVPN's own limit is 2,048.
pub const MESSAGE_BYTES_MAX: usize = 16 * 1024;

/// A message does not end: the peer's fault, its session must end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the peer's message has more than {MESSAGE_BYTES_MAX} bytes: end its session")]
pub struct EndlessMessage;

/// Puts messages together. What it holds may be a part of a token, and is not shown.
#[derive(Default)]
pub struct MessageReader {
    held: Vec<u8>,
}

impl fmt::Debug for MessageReader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MessageReader").field("held", &self.held.len()).finish()
    }
}

impl MessageReader {
    /// Takes bytes as they come, and returns the messages that are whole now. CR and LF at a message's end are cut
    /// off. Empty messages are left out, and those with control characters. A message may hold a token.
    ///
    /// # Errors
    /// [`EndlessMessage`]
    pub fn handle_bytes(&mut self, bytes: &[u8]) -> Result<Vec<Zeroizing<String>>, EndlessMessage> {
        let mut messages = Vec::new();
        let mut rest = bytes;
        while let Some(end) = rest.iter().position(|byte| *byte == 0) {
            let (piece, behind) = rest.split_at(end);
            rest = behind.get(1..).unwrap_or_default();
            self.hold(piece)?;
            messages.extend(text_of(&self.held));
            self.held.zeroize();
        }
        self.hold(rest)?;
        Ok(messages)
    }

    fn hold(&mut self, piece: &[u8]) -> Result<(), EndlessMessage> {
        if self.held.len() + piece.len() > MESSAGE_BYTES_MAX {
            return Err(EndlessMessage);
        }
        self.held.extend_from_slice(piece);
        Ok(())
    }
}

fn text_of(message: &[u8]) -> Option<Zeroizing<String>> {
    let end = message.iter().rposition(|byte| !matches!(byte, b'\r' | b'\n'))?;
    let message = message.get(..=end)?;
    let is_plain = message.iter().all(|byte| *byte >= 0x20 && *byte != 0x7f);
    is_plain.then(|| Zeroizing::new(String::from_utf8_lossy(message).into_owned()))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn messages_end_with_a_nul() {
        let mut reader = MessageReader::default();
        let texts = |read: Result<Vec<Zeroizing<String>>, EndlessMessage>| -> Vec<String> {
            read.unwrap().iter().map(|message| message.to_string()).collect()
        };
        let read = reader.handle_bytes(b"PUSH_REQUEST\0\0bad\x01one\0bad\r\ntwo\0EXIT\r\n\0half");
        assert_eq!(texts(read), ["PUSH_REQUEST", "EXIT"]);
        assert_eq!(texts(reader.handle_bytes(b" and half\0")), ["half and half"]);
        let long = vec![b'x'; MESSAGE_BYTES_MAX];
        assert_eq!(texts(reader.handle_bytes(&long)), [""; 0]);
        assert_eq!(reader.handle_bytes(b"x"), Err(EndlessMessage));
    }

    proptest! {
        #[test]
        fn messages_come_back_however_the_stream_is_cut(
            messages in prop::collection::vec("[ -~]{1,20}", 0..6),
            cuts in prop::collection::vec(1_usize..9, 0..60),
        ) {
            let stream: Vec<u8> =
                messages.iter().flat_map(|message| [message.as_bytes(), &[0]].concat()).collect();
            let (mut reader, mut rest, mut got) = (MessageReader::default(), &stream[..], Vec::new());
            for cut in cuts.into_iter().chain([stream.len()]) {
                let (piece, behind) = rest.split_at(cut.min(rest.len()));
                got.extend(reader.handle_bytes(piece).unwrap().iter().map(|text| text.to_string()));
                rest = behind;
            }
            prop_assert_eq!(got, messages);
        }

        #[test]
        fn no_bytes_make_it_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = MessageReader::default().handle_bytes(&bytes);
        }
    }
}
