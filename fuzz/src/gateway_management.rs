//! Lines that programs send to the management interface.

/// What must hold stands beside the private parts that it holds of.
pub fn run(data: &[u8]) {
    weft_daemon::fuzzed::gateway_management(data);
}
