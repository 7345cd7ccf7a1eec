//! A device's messages as JSON, in the shape and with the names of the kernel's own specification: its
//! self-tests compare them literally.

use std::net::SocketAddr;

use serde_json::{Map, Value, json};
use weft_openvpn::device::{CipherAlgorithm, KeyState, Notice, Notification, PeerState, Traffic};

/// A notification.
pub(super) fn notice(notice: &Notice) -> Value {
    let ifindex = notice.device;
    match &notice.what {
        Notification::PeerDeleted { peer_id, reason } => json!({
            "name": "peer-del-ntf",
            "msg": {"ifindex": ifindex, "peer": {"del-reason": reason.name(), "id": peer_id}},
        }),
        Notification::KeySwap { peer_id, key_id } => json!({
            "name": "key-swap-ntf",
            "msg": {"ifindex": ifindex, "keyconf": {"peer-id": peer_id, "key-id": key_id}},
        }),
        Notification::PeerFloat { peer_id, remote } => {
            let mut peer = Map::from_iter([("id".to_owned(), json!(peer_id))]);
            put_address(&mut peer, "remote", *remote);
            json!({"name": "peer-float-ntf", "msg": {"ifindex": ifindex, "peer": peer}})
        }
    }
}

/// The end of a peer whose reason is unknown, since its notice was lost. The specification has no word for
/// that.
pub(super) fn gone(ifindex: u32, peer_id: u32) -> Value {
    json!({
        "name": "peer-del-ntf",
        "msg": {"ifindex": ifindex, "peer": {"del-reason": "unknown", "id": peer_id}},
    })
}

/// Dropped packets by reason; reasons without drops are omitted.
pub(super) fn drops(counts: impl Iterator<Item = (&'static str, u64)>) -> Value {
    let counts = counts.filter(|(_, count)| *count > 0);
    Value::Object(counts.map(|(why, count)| (why.to_owned(), json!(count))).collect())
}

/// A packet of the control channel, which the specification does not cover.
pub(super) fn packet(ifindex: u32, source: Option<SocketAddr>, packet: &[u8]) -> Value {
    let bytes: String = packet.iter().map(|byte| format!("{byte:02x}")).collect();
    let source = source.map(|source| source.to_string());
    json!({"name": "packet", "msg": {"ifindex": ifindex, "source": source, "bytes": bytes}})
}

/// A peer.
pub(super) fn peer(state: &PeerState) -> Value {
    let mut peer = Map::new();
    let mut put = |name: &str, value: Value| peer.insert(name.to_owned(), value);
    put("id", json!(state.id));
    if let Some(tx_id) = state.tx_id {
        put("tx-id", json!(tx_id));
    }
    if let Some(address) = state.vpn_ipv4 {
        put("vpn-ipv4", json!(address));
    }
    if let Some(address) = state.vpn_ipv6 {
        put("vpn-ipv6", json!(address));
    }
    put("keepalive-interval", json!(state.keepalive.interval_s));
    put("keepalive-timeout", json!(state.keepalive.timeout_s));
    for (prefix, traffic) in [("vpn", state.vpn), ("link", state.link)] {
        let Traffic { rx_bytes, tx_bytes, rx_packets, tx_packets } = traffic;
        let counters = [
            ("rx-bytes", rx_bytes),
            ("tx-bytes", tx_bytes),
            ("rx-packets", rx_packets),
            ("tx-packets", tx_packets),
        ];
        for (name, count) in counters {
            put(&format!("{prefix}-{name}"), json!(count));
        }
    }
    if let Some(remote) = state.remote {
        put_address(&mut peer, "remote", remote);
    }
    if let Some(local) = state.local {
        put_address(&mut peer, "local", local);
    }
    if let Some(netns) = state.socket_netns {
        peer.insert("socket-netnsid".to_owned(), json!(netns));
    }
    Value::Object(peer)
}

/// The state of a key.
pub(super) fn key(peer_id: u32, slot: &str, state: KeyState) -> Value {
    let cipher = match state.cipher {
        CipherAlgorithm::None => "none",
        CipherAlgorithm::AesGcm => "aes-gcm",
        CipherAlgorithm::ChaCha20Poly1305 => "chacha20-poly1305",
    };
    let mut key = json!({
        "peer-id": peer_id, "slot": slot, "key-id": state.key_id, "cipher-alg": cipher
    });
    if let Some(epoch) = state.epoch {
        key["epoch"] = json!(epoch);
    }
    key
}

fn put_address(object: &mut Map<String, Value>, prefix: &str, address: SocketAddr) {
    let family = if address.is_ipv4() { "ipv4" } else { "ipv6" };
    object.insert(format!("{prefix}-{family}"), json!(address.ip()));
    object.insert(format!("{prefix}-port"), json!(address.port()));
    if let SocketAddr::V6(v6) = address
        && v6.scope_id() != 0
    {
        object.insert(format!("{prefix}-ipv6-scope-id"), json!(v6.scope_id()));
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use weft_openvpn::device::{DeletionReason, Keepalive};

    use super::*;

    #[test]
    fn notices_are_told_in_the_specifications_words() {
        let told = |what| notice(&Notice { device: 7, what }).to_string();
        let reason = DeletionReason::TransportDisconnect;
        assert_eq!(
            told(Notification::PeerDeleted { peer_id: 10, reason }),
            r#"{"msg":{"ifindex":7,"peer":{"del-reason":"transport-disconnect","id":10}},"name":"peer-del-ntf"}"#
        );
        assert_eq!(
            told(Notification::KeySwap { peer_id: 1, key_id: 3 }),
            r#"{"msg":{"ifindex":7,"keyconf":{"key-id":3,"peer-id":1}},"name":"key-swap-ntf"}"#
        );
        let float = |remote: &str| {
            told(Notification::PeerFloat { peer_id: 2, remote: remote.parse().unwrap() })
        };
        assert_eq!(
            float("192.0.2.3:1194"),
            r#"{"msg":{"ifindex":7,"peer":{"id":2,"remote-ipv4":"192.0.2.3","remote-port":1194}},"name":"peer-float-ntf"}"#
        );
        let scoped = float("[fe80::1%4]:9");
        assert!(scoped.contains(r#""remote-ipv6-scope-id":4"#), "{scoped}");
        assert!(!float("[2001:db8::1]:9").contains("scope"));
    }

    #[test]
    fn a_lost_end_is_told_like_others_with_a_reason_of_its_own() {
        assert_eq!(
            gone(7, 10).to_string(),
            r#"{"msg":{"ifindex":7,"peer":{"del-reason":"unknown","id":10}},"name":"peer-del-ntf"}"#
        );
        assert!(DeletionReason::ALL.iter().all(|reason| reason.name() != "unknown"));
    }

    #[test]
    fn of_drops_those_are_told_that_there_were() {
        let counts = [("no_path", 3), ("forged", 0), ("too_old", 1)];
        assert_eq!(drops(counts.into_iter()), json!({"no_path": 3, "too_old": 1}));
    }

    #[test]
    fn a_peer_has_its_addresses_and_all_of_its_counters() {
        let state = PeerState {
            id: 5,
            remote: "192.0.2.3:1194".parse().ok(),
            vpn_ipv4: "10.8.0.5".parse().ok(),
            keepalive: Keepalive { interval_s: 10, timeout_s: 60 },
            vpn: Traffic { rx_bytes: 1, tx_bytes: 2, rx_packets: 3, tx_packets: 4 },
            ..PeerState::default()
        };
        let told = peer(&state);
        assert_eq!(told["remote-ipv4"], "192.0.2.3");
        assert_eq!(told["vpn-ipv4"], "10.8.0.5");
        assert_eq!(told["keepalive-timeout"], 60);
        assert_eq!((&told["vpn-tx-packets"], &told["link-rx-bytes"]), (&json!(4), &json!(0)));
        assert_eq!(told.get("tx-id"), None);
    }
}
