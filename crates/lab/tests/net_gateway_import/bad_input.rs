//! Configurations that cannot be taken over: each has a reason by name, and nothing changes.

use anyhow::ensure;

use crate::pki::Keys;
use crate::stage::{SERVER, Stage};

/// What replaces what in the configuration, the reason in the report, and whether the line may be left out.
const FAULTS: [(&str, &str, &str, bool); 18] = [
    ("verb 3", "push \"route 10.0.0.0", "a \" has no second one", false),
    ("verb 3", "no-such-thing 5", "OpenVPN has no directive", true),
    ("port 1194", "port many", "port has a bad value \"many\"", true),
    ("ca ca.crt", "ca gone.crt", "gone.crt cannot be read", false),
    ("key server.key", "key server.crt", "key holds no private key in PEM", false),
    ("cert server.crt", "cert server.key", "cert holds no \"CERTIFICATE\" in PEM", false),
    ("key server.key", "key ca.key", "cert and key do not go together", false),
    ("cert server.crt", "cert expired.crt", "of cert ended on 2021-01-01", false),
    ("verb 3", "tls-crypt server.key", "not a static key file", false),
    ("verb 3", "tls-crypt-v2 ta.key", "tls-crypt-v2-server", false),
    ("verb 3", "tls-auth ta.key 0\ntls-crypt ta.key", "exclude each other", false),
    ("verb 3", "crl-verify old.pem", "(crl-verify) ended on 2021-01-01", false),
    ("verb 3", "crl-verify other/crl.pem", "signed by no authority of ca", false),
    ("dev tun", "dev tap", "change dev tap to dev tun", true),
    ("server 10.8.0.0", "server 10.8.0.7", "the first address of the network", false),
    ("verb 3", "client-connect /bin/true", "it runs a program", false),
    ("client-config-dir ccd", "client-config-dir nowhere", "nowhere cannot be read", false),
    ("verb 3", "management 127.0.0.1 7505", "write a file with its password", true),
];

/// Files of clients, and the reason in the report.
const CLIENTS: [(&[(&str, &str)], &str); 5] = [
    (&[("alice", "ifconfig-push 10.9.0.5 255.255.255.0")], "10.9.0.5 is not in 10.8.0.0/24"),
    (&[("alice", "ifconfig-push 10.8.0.1 255.255.255.0")], "10.8.0.1 is no client's address"),
    (
        &[
            ("alice", "ifconfig-push 10.8.0.5 255.255.255.0"),
            ("bob", "ifconfig-push 10.8.0.5 255.255.255.0"),
        ],
        "10.8.0.5 is the address of alice, too",
    ),
    (
        &[
            ("alice", "iroute 192.168.7.0 255.255.255.0"),
            ("bob", "iroute 192.168.7.0 255.255.255.0"),
        ],
        "192.168.7.0/24 is behind alice, too",
    ),
    (&[("alice", "ifconfig-push 10.8.0.5")], "ifconfig-push has a value too few"),
];

#[test]
fn what_cannot_be_taken_over_is_named_and_nothing_changes() -> anyhow::Result<()> {
    let stage = Stage::new(Keys::Ecdsa)?;
    let host = stage.host();
    stage.pki.issue_expired("expired", "server")?;
    stage.pki.old_crl()?;
    crate::pki::Pki::new(&stage.folder.join("other"), Keys::Ecdsa)?;
    let networks = host.weft_json(&["network", "ls"])?;
    let state = || {
        let mut names: Vec<_> = std::fs::read_dir(host.state_directory())
            .map(|entries| entries.flatten().map(|entry| entry.file_name()).collect())
            .unwrap_or_default();
        names.sort();
        names
    };
    let files = state();
    for (what, by, reason, may_be_left_out) in FAULTS {
        let config = SERVER.replacen(what, by, 1);
        ensure!(config != SERVER, "{what}");
        let refused = stage.import(&config, &[])?;
        ensure!(refused.status.code() == Some(5), "{by}: {refused:?}");
        ensure!(refused.stdout.contains(reason), "{by}: {}", refused.stdout);
        ensure!(refused.stderr.contains("nothing was taken over"), "{refused:?}");
        // Nothing is left out that decides who is let in.
        let without = stage.import(&config, &["--without-refused", "--dry-run"])?;
        ensure!(without.status.success() == may_be_left_out, "{by}: {without:?}");
    }
    for (clients, reason) in CLIENTS {
        for (name, text) in clients {
            stage.write(&format!("ccd/{name}"), &format!("{text}\n"))?;
        }
        let refused = stage.import(SERVER, &["--without-refused"])?;
        ensure!(refused.status.code() == Some(5), "{reason}: {refused:?}");
        ensure!(refused.stdout.contains(reason), "{reason}: {}", refused.stdout);
        for (name, _) in clients {
            std::fs::remove_file(stage.folder.join("ccd").join(name))?;
        }
    }
    ensure!(host.weft_json(&["network", "ls"])? == networks, "a network was made");
    ensure!(state() == files, "files were written: {:?}", state());
    let refused = host.weft(&["openvpn", "serve"])?;
    ensure!(refused.stderr.contains("weft ca init"), "{refused:?}");
    let none = host.weft(&["openvpn", "import", "--crl", &stage.path("crl.pem")])?;
    ensure!(none.stderr.contains("no configuration of an OpenVPN server"), "{none:?}");
    Ok(())
}
