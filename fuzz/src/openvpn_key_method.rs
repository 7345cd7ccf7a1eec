//! Messages of key method 2. Input: role 1 byte (bit 0 a server's message), then the message's bytes.

use weft_openvpn::key_method::{ClientMessage, ServerMessage};

/// What is read ends within the bytes, and is written with the same meaning.
pub fn run(data: &[u8]) {
    let Some((role, bytes)) = data.split_first() else { return };
    let mut again = Vec::new();
    if role & 1 == 0 {
        let Ok(Some((message, consumed))) = ClientMessage::read(bytes) else { return };
        assert!(consumed <= bytes.len());
        let _ = message.peer_info.ciphers();
        if message.write(&mut again).is_ok() {
            // What was too long, or no text, is not written as it was; the rest is.
            let (read, length) = ClientMessage::read(&again).expect("written").expect("whole");
            assert_eq!((length, &read.source), (again.len(), &message.source));
        }
    } else {
        let Ok(Some((message, consumed))) = ServerMessage::read(bytes) else { return };
        assert!(consumed <= bytes.len());
        if message.write(&mut again).is_ok() {
            let (read, length) = ServerMessage::read(&again).expect("written").expect("whole");
            assert_eq!((length, &read.source), (again.len(), &message.source));
        }
    }
}
