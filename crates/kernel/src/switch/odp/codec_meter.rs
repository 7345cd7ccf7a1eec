//! Messages of the family ovs_meter, which work since Linux 4.18 (`linux/openvswitch.h`).

use super::{
    codec::{ovs_body, ovs_header},
    limits::Class,
};
use crate::netlink::{
    generic,
    reader::{attribute, attributes, u64_at},
    writer::{Answer, Writer},
};

/// The family's name.
pub(super) const METER_FAMILY: &str = "ovs_meter";
const METER_VERSION: u8 = 1;
const CMD_SET: u8 = 2;
const CMD_GET: u8 = 4;

const METER_ATTR_ID: u16 = 1;
const METER_ATTR_BANDS: u16 = 4;

/// A band within the list of bands; the kernel ignores its type.
const BAND: u16 = 0;
const BAND_ATTR_TYPE: u16 = 1;
const BAND_ATTR_RATE: u16 = 2;
const BAND_ATTR_BURST: u16 = 3;
const BAND_ATTR_STATS: u16 = 4;
/// A band that drops frames above its rate (OVS_METER_BAND_TYPE_DROP).
const BAND_DROP: u32 = 1;

/// Creates a meter, or replaces the meter of this number and resets its counts to 0. Its rates are in
/// packets, as there is no OVS_METER_ATTR_KBPS.
pub(super) fn set_meter(family: u16, datapath: u32, id: u32, class: Class) -> Writer {
    let mut request = meter_request(family, CMD_SET, datapath, id);
    request.nest(METER_ATTR_BANDS, |bands| {
        bands.nest(BAND, |band| {
            band.u32(BAND_ATTR_TYPE, BAND_DROP);
            band.u32(BAND_ATTR_RATE, class.rate());
            // Before Linux 5.13 the frames of a second pass at once besides.
            band.u32(BAND_ATTR_BURST, class.at_once());
        });
    });
    request
}

/// Asks for a meter's counts.
pub(super) fn get_meter(family: u16, datapath: u32, id: u32) -> Writer {
    meter_request(family, CMD_GET, datapath, id)
}

/// Packets that a meter has dropped.
pub(super) fn meter_dropped(body: &[u8]) -> Option<u64> {
    let (_, list) = ovs_body(body)?;
    let bands = attribute(list, METER_ATTR_BANDS)?;
    let dropped = |(_, band)| u64_at(attribute(band, BAND_ATTR_STATS)?, 0);
    Some(attributes(bands).filter_map(dropped).sum())
}

fn meter_request(family: u16, command: u8, datapath: u32, id: u32) -> Writer {
    let mut request = generic::request(family, METER_VERSION, command, Answer::Acknowledgement);
    ovs_header(&mut request, datapath);
    request.u32(METER_ATTR_ID, id);
    request
}
