//! Kernels that lack a feature: the tests unload its modules.

use std::process::Command;
use std::time::{Duration, Instant};

use weft_crypto::Cipher;
use weft_kernel::{KernelError, xfrm::StateSpec};

use crate::lab::{Host, block_on, run, state};

#[test]
fn a_missing_cipher_is_named() {
    const MODPROBE: &str = "/proc/sys/kernel/modprobe";
    block_on(async {
        unload(&["esp4", "esp6", "chacha20poly1305"]);
        let loaded = std::fs::read_to_string("/proc/crypto").unwrap();
        assert!(!loaded.contains("rfc7539esp"), "ChaCha20-Poly1305 is still there");
        let host = Host::new(1, false);
        let before = std::fs::read_to_string(MODPROBE).unwrap();
        std::fs::write(MODPROBE, "/usr/bin/false").unwrap();
        let nothing = host.xfrm.support().await;
        std::fs::write(MODPROBE, before.trim()).unwrap();
        let error = nothing.unwrap_err();
        assert!(matches!(error, KernelError::NoEsp { .. }), "{error}");
        assert!(error.to_string().contains("not support ESP"), "{error}");

        run("modprobe", &["-a", "esp4", "esp6", "gcm", "seqiv"]);
        host.add(&[state(&host, &host, 0x1000)]).await;
        std::fs::write(MODPROBE, "/usr/bin/false").unwrap();
        let chacha = StateSpec { cipher: Cipher::ChaCha20Poly1305, ..state(&host, &host, 0x1001) };
        let refused = host.xfrm.add_states(&[chacha]).await.pop().unwrap();
        let support = host.xfrm.support().await;
        std::fs::write(MODPROBE, before.trim()).unwrap();
        let error = refused.unwrap_err();
        let named = KernelError::NoCipher { cipher: "chacha20-poly1305", known: false };
        assert_eq!(error.to_string(), named.to_string());
        assert_eq!(support.unwrap().ciphers, [Cipher::Aes256Gcm]);
        // The module came later: no restart is needed.
        assert_eq!(host.xfrm.support().await.unwrap().ciphers.len(), 2);
    });
}

/// Unloads modules in this order; a module that is not loaded is not an error. Namespaces of earlier tests that
/// are going away may hold on to them for a while.
fn unload(names: &[&str]) {
    const LIMIT: Duration = Duration::from_secs(60);
    let end = Instant::now() + LIMIT;
    for name in names {
        while !Command::new("modprobe").args(["-r", name]).status().unwrap().success() {
            assert!(Instant::now() < end, "module {name} is still in use");
            std::thread::sleep(Duration::from_millis(200));
        }
    }
}
