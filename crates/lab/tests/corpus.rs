//! The fuzz targets over their committed corpus, and over each input cut short or with a byte changed. `./dev
//! fuzz` does this for longer and with libFuzzer's choice of inputs.
#![allow(clippy::unwrap_used, missing_docs)]

use std::panic::catch_unwind;
use std::path::Path;

#[allow(unreachable_pub, reason = "a separate library where libFuzzer builds it")]
#[path = "../../../fuzz/src/lib.rs"]
mod targets;

/// The most positions changed in one input; in longer inputs they are evenly spaced.
const CHANGES_MAX: usize = 2_000;

fn replay(name: &str, run: fn(&[u8])) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus").join(name);
    let mut count = 0;
    for entry in std::fs::read_dir(&folder).unwrap() {
        let path = entry.unwrap().path();
        let seed = std::fs::read(&path).unwrap();
        let check = |data: &[u8], what: &str| {
            let shown = path.display();
            assert!(catch_unwind(|| run(data)).is_ok(), "{name} fails on {shown}, {what}");
        };
        check(&seed, "as it is");
        let step = seed.len().div_ceil(CHANGES_MAX).max(1);
        for at in (0..seed.len()).step_by(step) {
            check(&seed[..at], &format!("cut to {at} bytes"));
            let mut changed = seed.clone();
            for bits in [0x01, 0x80, 0xff] {
                changed[at] = seed[at] ^ bits;
                check(&changed, &format!("with {bits:#x} on byte {at}"));
            }
        }
        count += 1;
    }
    assert!(count >= 3, "{count} inputs in {}", folder.display());
}

#[test]
fn split() {
    replay("split", targets::split::run);
}

#[test]
fn coalesce() {
    replay("coalesce", targets::coalesce::run);
}

#[test]
fn esp_open() {
    replay("esp_open", targets::esp_open::run);
}

#[test]
fn ovpn_open() {
    replay("ovpn_open", targets::ovpn_open::run);
}

#[test]
fn openvpn_key_method() {
    replay("openvpn_key_method", targets::openvpn_key_method::run);
}

#[test]
fn openvpn_messages() {
    replay("openvpn_messages", targets::openvpn_messages::run);
}

#[test]
fn openvpn_config() {
    replay("openvpn_config", targets::openvpn_config::run);
}

#[test]
fn openvpn_keys() {
    replay("openvpn_keys", targets::openvpn_keys::run);
}

#[test]
fn openvpn_server() {
    replay("openvpn_server", targets::openvpn_server::run);
}

#[test]
fn openvpn_client() {
    replay("openvpn_client", targets::openvpn_client::run);
}

#[test]
fn gateway_peers() {
    replay("gateway_peers", targets::gateway_peers::run);
}

#[test]
fn gateway_management() {
    replay("gateway_management", targets::gateway_management::run);
}

#[test]
fn vxlan() {
    replay("vxlan", targets::vxlan::run);
}

#[test]
fn vnet() {
    replay("vnet", targets::vnet::run);
}
