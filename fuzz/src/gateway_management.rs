//! Lines that programs send to the management interface.

/// The daemon checks the properties, beside the private parts that they concern.
pub fn run(data: &[u8]) {
    weft_daemon::fuzzed::gateway_management(data);
}
