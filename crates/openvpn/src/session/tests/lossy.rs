//! A bad channel: both ends connect and agree on each key all the same.

use std::time::Duration;

use proptest::prelude::*;

use super::net::{Net, Setup};
use crate::device::{KeyBlock, Side};
use crate::wrap::{AuthDigest, AuthDirection, WrapKeys};

fn setup(kind: u8) -> Setup {
    let key = KeyBlock::new(std::array::from_fn(|at| (at * 7) as u8));
    match kind {
        0 => Setup::default(),
        1 => Setup::with_wrap(
            WrapKeys::tls_auth(&key, AuthDigest::Sha256, AuthDirection::Zero),
            WrapKeys::tls_auth(&key, AuthDigest::Sha256, AuthDirection::One),
        ),
        2 => Setup::with_wrap(
            WrapKeys::tls_crypt(&key, Side::Server),
            WrapKeys::tls_crypt(&key, Side::Client),
        ),
        _ => Setup::with_crypt_v2(),
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    #[test]
    fn two_ends_connect_and_renew_over_a_bad_channel(
        seed in 1_u64..,
        kind in 0_u8..4,
        mischief in 1_u64..25,
    ) {
        let mut setup = setup(kind);
        (setup.seed, setup.mischief) = (seed, mischief);
        // Only the retransmissions count here, not the time that they may take.
        for timing in [&mut setup.client_timing, &mut setup.server_timing] {
            timing.hand_window = Duration::from_secs(600);
            timing.renegotiate_after = None;
        }
        setup.gate.hand_window = Duration::from_secs(600);
        let mut net = Net::new(setup);
        net.run_until_connected();
        prop_assert!(net.agree_on(0));
        let now = net.now;
        net.client.renegotiate(now).unwrap();
        prop_assert!(net.run(Duration::from_secs(900), |net| net.agree_on(1)), "seed {seed}");
        let now = net.now;
        // The last words of the handshake may still be on their way.
        let _ = net.server().renegotiate(now);
        prop_assert!(net.run(Duration::from_secs(900), |net| net.agree_on(2)), "seed {seed}");
        prop_assert_eq!((&net.client_said.ended, &net.server_said.ended), (&None, &None));
    }
}
