//! Messages of other gateways, and what a host does meanwhile.

/// The daemon checks the properties, beside the private parts that they concern.
pub fn run(data: &[u8]) {
    weft_daemon::fuzzed::gateway_peers(data);
}
