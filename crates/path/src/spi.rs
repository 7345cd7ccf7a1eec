//! The SPI of each wire format.

use weft_crypto::Format;

/// Mask of the opcode in the first word of a packet of format `ovpn`.
const OVPN_OPCODE_MASK: u32 = 0xf800_0000;
/// The opcode DATA_V2 in that word.
pub(crate) const OVPN_DATA_V2: u32 = 9 << 27;
/// The peer id that means "no peer".
const OVPN_NO_PEER: u32 = 0xff_ffff;
/// Key ids of one peer id; the key id stands in front of it.
pub(crate) const OVPN_KEY_IDS: u32 = 8;
/// Bit offset of the key id in the first word.
pub(crate) const OVPN_KEY_ID_AT: u32 = 24;

/// Whether packets of this format can carry this SPI. RFC 4303 section 2.1 reserves SPIs below 256. In
/// format `ovpn` the SPI is the first word: DATA_V2, a key id and a peer id.
pub(crate) const fn is_spi(format: Format, spi: u32) -> bool {
    match format {
        Format::Ovpn => {
            spi & OVPN_OPCODE_MASK == OVPN_DATA_V2 && spi & OVPN_NO_PEER != OVPN_NO_PEER
        }
        Format::Esp | Format::Plain => spi >= 256,
    }
}
