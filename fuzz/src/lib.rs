//! The properties that the fuzz targets check on any bytes: each panics if one does not hold. No code of these
//! needs libFuzzer; `crates/lab/tests/corpus.rs` runs them over `fuzz/corpus` with each test run.

pub mod coalesce;
mod control_channel;
pub mod esp_open;
pub mod gateway_management;
pub mod gateway_peers;
pub mod openvpn_client;
pub mod openvpn_config;
pub mod openvpn_key_method;
pub mod openvpn_keys;
pub mod openvpn_messages;
pub mod openvpn_server;
pub mod ovpn_open;
#[expect(dead_code, reason = "the tests of the engine use all of it")]
#[path = "../../crates/engine/src/tests/referee.rs"]
mod referee;
pub mod split;
pub mod vnet;
pub mod vxlan;

/// Alters a packet: each alteration is 2 bytes of place and 1 byte to XOR there. A place behind its end
/// makes it shorter or longer.
fn alter(packet: &mut Vec<u8>, alterations: &[u8]) {
    let whole = packet.len();
    for alteration in alterations.as_chunks::<3>().0 {
        let [low, high, bits] = *alteration;
        let at = usize::from(u16::from_le_bytes([low, high]));
        match packet.get_mut(at) {
            Some(byte) => *byte ^= bits,
            None if at % 2 == 0 => packet.truncate(at % (whole + 1)),
            None => packet.push(bits),
        }
    }
}
