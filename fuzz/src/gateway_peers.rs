//! Messages of other gateways, and what a host does meanwhile.

/// What must hold stands beside the private parts that it holds of.
pub fn run(data: &[u8]) {
    weft_daemon::fuzzed::gateway_peers(data);
}
