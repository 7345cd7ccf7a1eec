//! The rows of tunnels from Debian packages: fastd, tinc, quicktun, n2n and Yggdrasil.

use std::net::IpAddr;
use std::path::Path;
use std::process::Command;

use serde_json::{Value, json};

use super::ends::{End, Ends, Ready};
use super::install::{LeftOut, debian_program, debian_version};
use super::others::write_secret;
use crate::sandbox::{SandboxError, run};

const FASTD_PORT: u16 = 10_000;
const TINC_PORT: u16 = 655;
const QUICKTUN_PORT: u16 = 2_998;
const N2N_PORT: u16 = 7_653;
const SUPERNODE_PORT: u16 = 7_654;
const YGGDRASIL_PORT: u16 = 9_001;

/// Its fastest kind of encrypted method, which it also recommends.
const FASTD_METHOD: &str = "salsa2012+umac";
/// n2n takes its key from the environment or the command line, and others may read the latter.
const WITH_N2N_KEY: &str = "N2N_KEY=$(cat \"$0\") exec \"$@\"";

pub(super) fn fastd(ends: &Ends<'_>) -> Result<Ready, LeftOut> {
    let binary = debian_program("fastd", "fastd")?;
    let fastd = || {
        let mut command = Command::new(&binary);
        command.arg("--machine-readable");
        command
    };
    let mut publics = Vec::new();
    for index in 0..2 {
        let secret = run(fastd().arg("--generate-key"))?.stdout;
        let key = ends.file(index, "key");
        write_secret(&key, &format!("secret \"{}\";\n", secret.trim()))?;
        let public = run(fastd().arg("--show-key").arg("--config").arg(&key))?.stdout;
        publics.push(public.trim().to_owned());
    }
    let mut ready = Ready { version: debian_version("fastd"), ..Ready::default() };
    for index in 0..2 {
        let config = ends.file(index, "conf");
        let text = fastd_config(&ends.end(index), &ends.file(index, "key"), &publics[1 - index]);
        write_secret(&config, &text)?;
        ready.commands[index] =
            words(&[&binary.to_string_lossy(), "-c", &config.to_string_lossy()]);
    }
    Ok(ready)
}

fn fastd_config(end: &End, key: &Path, peer: &str) -> String {
    let (End { device, mtu, .. }, [outer, peer_outer]) = (end, end.outer);
    format!(
        "mode tun;\ninterface \"{device}\";\nmtu {mtu};\nmethod \"{FASTD_METHOD}\";\n\
         bind {outer}:{FASTD_PORT};\ninclude \"{}\";\n\
         peer \"end{}\" {{\n  key \"{peer}\";\n  remote {peer_outer}:{FASTD_PORT};\n}}\n",
        key.display(),
        end.numbers[1],
    )
}

pub(super) fn tinc(ends: &Ends<'_>) -> Result<Ready, LeftOut> {
    let binary = debian_program("tincd", "tinc")?;
    let binary = binary.to_string_lossy();
    let mut hosts = Vec::new();
    for index in 0..2 {
        let (end, directory) = (ends.end(index), ends.directory(index, "d")?);
        ends.directory(index, "d/hosts")?;
        write_secret(&directory.join("tinc.conf"), &tinc_config(&end))?;
        let own = directory.join(format!("hosts/end{}", end.numbers[0]));
        write_secret(&own, &tinc_host(&end))?;
        // The public key goes to the end of the host's own file.
        run(Command::new(&*binary).arg("-c").arg(&directory).arg("-K2048"))?;
        hosts.push(std::fs::read_to_string(&own).map_err(SandboxError::io("read tinc's key"))?);
    }
    let mut ready = Ready { version: debian_version("tinc"), ..Ready::default() };
    for index in 0..2 {
        let directory = ends.file(index, "d");
        let other = directory.join(format!("hosts/end{}", ends.end(index).numbers[1]));
        write_secret(&other, &hosts[1 - index])?;
        let pid_file = format!("--pidfile={}", directory.join("pid").display());
        ready.commands[index] =
            words(&[&binary, "-c", &directory.to_string_lossy(), "-D", &pid_file]);
    }
    Ok(ready)
}

/// The second end connects, since the first is there before it.
fn tinc_config(end: &End) -> String {
    let ([number, peer], device) = (end.numbers, end.device);
    let connect = if number == 2 { format!("ConnectTo = end{peer}\n") } else { String::new() };
    format!(
        "Name = end{number}\nAddressFamily = ipv4\nDevice = /dev/net/tun\nDeviceType = tun\n\
         Interface = {device}\nMode = router\n{connect}"
    )
}

/// One end's settings, which both ends have. With its search for the MTU, tinc would carry packets over TCP
/// until the search ends.
fn tinc_host(end: &End) -> String {
    let ([own, _], [outer, _]) = (end.inner, end.outer);
    format!(
        "Address = {outer} {TINC_PORT}\nSubnet = {own}/32\nCipher = aes-256-cbc\nDigest = sha1\n\
         PMTUDiscovery = no\n"
    )
}

/// As Debian builds it: settings in the environment, named as in `/etc/network/interfaces`.
pub(super) fn quicktun(ends: &Ends<'_>) -> Result<Ready, LeftOut> {
    let binary = debian_program("quicktun", "quicktun")?;
    let keypair = debian_program("keypair", "quicktun")?;
    let mut publics = Vec::new();
    for index in 0..2 {
        let output = run(&mut Command::new(&keypair))?;
        let (secret, public) = quicktun_keys(&output.stdout)
            .ok_or("`keypair` does not print SECRET and PUBLIC; it may not be quicktun's")?;
        write_secret(&ends.file(index, "key"), &format!("{secret}\n"))?;
        publics.push(public);
    }
    let mut ready = Ready { version: debian_version("quicktun"), ..Ready::default() };
    for index in 0..2 {
        let settings =
            quicktun_settings(&ends.end(index), &ends.file(index, "key"), &publics[1 - index]);
        let program = binary.to_string_lossy().into_owned();
        ready.commands[index] =
            std::iter::once("env".to_owned()).chain(settings).chain([program]).collect();
    }
    Ok(ready)
}

fn quicktun_settings(end: &End, key: &Path, peer: &str) -> [String; 9] {
    let (device, [outer, peer_outer]) = (end.device, end.outer);
    [
        format!("IFACE={device}"),
        "IF_QT_TUN_MODE=1".to_owned(),
        "IF_QT_PROTOCOL=nacltai".to_owned(),
        format!("IF_QT_LOCAL_ADDRESS={outer}"),
        format!("IF_QT_LOCAL_PORT={QUICKTUN_PORT}"),
        format!("IF_QT_REMOTE_ADDRESS={peer_outer}"),
        format!("IF_QT_REMOTE_PORT={QUICKTUN_PORT}"),
        format!("IF_QT_PRIVATE_KEY_FILE={}", key.display()),
        format!("IF_QT_PUBLIC_KEY={peer}"),
    ]
}

/// The secret and the public key that `keypair` prints.
fn quicktun_keys(text: &str) -> Option<(String, String)> {
    let key = |name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name))?;
        Some(line.trim().to_owned())
    };
    Some((key("SECRET:")?, key("PUBLIC:")?))
}

pub(super) fn n2n(ends: &Ends<'_>) -> Result<Ready, LeftOut> {
    let edge = debian_program("edge", "n2n")?;
    let supernode = debian_program("supernode", "n2n")?;
    let port = SUPERNODE_PORT.to_string();
    let mut ready = Ready {
        version: debian_version("n2n"),
        beside: words(&[&supernode.to_string_lossy(), "-l", &port]),
        ..Ready::default()
    };
    let password = ends.password()?;
    for index in 0..2 {
        let key = ends.file(index, "key");
        write_secret(&key, &password)?;
        // The supernode is on the second host.
        let supernode = format!("{}:{SUPERNODE_PORT}", ends.end(1).outer[0]);
        let (key, edge) = (key.to_string_lossy(), edge.to_string_lossy());
        let mut command = words(&["sh", "-c", WITH_N2N_KEY, &key, &edge]);
        command.extend(n2n_options(&ends.end(index), supernode));
        ready.commands[index] = command;
    }
    Ok(ready)
}

fn n2n_options(end: &End, supernode: String) -> [String; 14] {
    [
        "-d".to_owned(),
        end.device.to_owned(),
        "-a".to_owned(),
        end.inner[0].to_string(),
        "-s".to_owned(),
        "255.255.255.0".to_owned(),
        "-c".to_owned(),
        "weft".to_owned(),
        "-l".to_owned(),
        supernode,
        "-p".to_owned(),
        N2N_PORT.to_string(),
        "-M".to_owned(),
        end.mtu.to_string(),
    ]
}

/// Yggdrasil gives its device an address derived from its key, and a default MTU.
pub(super) fn yggdrasil(ends: &Ends<'_>) -> Result<Ready, LeftOut> {
    let binary = debian_program("yggdrasil", "yggdrasil")?;
    let mut ready = Ready { version: debian_version("yggdrasil"), ..Ready::default() };
    for index in 0..2 {
        let generated = run(Command::new(&binary).args(["-genconf", "-json"]))?.stdout;
        let generated = serde_json::from_str(&generated)
            .map_err(|_| "`yggdrasil -genconf -json` prints no JSON; it may not be Yggdrasil's")?;
        let config = ends.file(index, "conf");
        write_secret(&config, &yggdrasil_config(&ends.end(index), generated).to_string())?;
        ready.commands[index] =
            words(&[&binary.to_string_lossy(), "-useconffile", &config.to_string_lossy()]);
    }
    let config = ends.file(1, "conf");
    let output = run(Command::new(&binary).arg("-useconffile").arg(&config).arg("-address"))?;
    let address: Result<IpAddr, _> = output.stdout.trim().parse();
    ready.own_address = Some(
        address.map_err(|_| "`yggdrasil -address` prints no address; it may not be Yggdrasil's")?,
    );
    Ok(ready)
}

/// Changes the output of `yggdrasil -genconf`: one peer, and no search for others. The second end connects,
/// since the first is there before it. Yggdrasil encrypts from end to end, so TLS would encrypt twice.
fn yggdrasil_config(end: &End, mut generated: Value) -> Value {
    let ([number, _], [outer, peer]) = (end.numbers, end.outer);
    let (listen, peers) = match number {
        1 => (json!([format!("tcp://{outer}:{YGGDRASIL_PORT}")]), json!([])),
        _ => (json!([]), json!([format!("tcp://{peer}:{YGGDRASIL_PORT}")])),
    };
    for (name, value) in [
        ("IfName", json!(end.device)),
        ("Listen", listen),
        ("Peers", peers),
        ("AdminListen", json!("none")),
        ("MulticastInterfaces", json!([])),
    ] {
        if let Some(fields) = generated.as_object_mut() {
            fields.insert(name.to_owned(), value);
        }
    }
    generated
}

fn words(words: &[&str]) -> Vec<String> {
    words.iter().copied().map(str::to_owned).collect()
}

#[cfg(test)]
mod tests {
    use super::super::ends::tests::END;
    use super::*;

    /// The second end of the same tunnel.
    const OTHER: End = End {
        numbers: [2, 1],
        outer: [END.outer[1], END.outer[0]],
        inner: [END.inner[1], END.inner[0]],
        ..END
    };

    #[test]
    fn fastd_is_encrypted_and_its_secret_is_in_another_file() {
        let text = fastd_config(&END, Path::new("/k"), "theirs");
        let expected = "mode tun;\ninterface \"dev0\";\nmtu 1420;\nmethod \"salsa2012+umac\";\n\
                        bind 192.0.2.1:10000;\ninclude \"/k\";\n\
                        peer \"end2\" {\n  key \"theirs\";\n  remote 192.0.2.2:10000;\n}\n";
        assert_eq!(text, expected);
    }

    #[test]
    fn the_second_end_of_tinc_connects_and_both_encrypt() {
        assert!(!tinc_config(&END).contains("ConnectTo"));
        assert!(tinc_config(&OTHER).contains("Name = end2\n"));
        assert!(
            tinc_config(&OTHER).ends_with("Interface = dev0\nMode = router\nConnectTo = end1\n")
        );
        let expected = "Address = 192.0.2.2 655\nSubnet = 198.18.12.2/32\nCipher = aes-256-cbc\n\
                        Digest = sha1\nPMTUDiscovery = no\n";
        assert_eq!(tinc_host(&OTHER), expected);
    }

    #[test]
    fn quicktun_reads_its_secret_from_a_file() {
        let settings = quicktun_settings(&END, Path::new("/k"), "theirs");
        for word in [
            "IF_QT_PROTOCOL=nacltai",
            "IF_QT_REMOTE_ADDRESS=192.0.2.2",
            "IF_QT_PRIVATE_KEY_FILE=/k",
            "IF_QT_PUBLIC_KEY=theirs",
        ] {
            assert!(settings.iter().any(|one| one == word), "{word} is not in {settings:?}");
        }
        let printed = "QuickTun\nSECRET: 0a\nPUBLIC: 0b\n";
        assert_eq!(quicktun_keys(printed), Some(("0a".to_owned(), "0b".to_owned())));
        assert_eq!(quicktun_keys("SECRET: 0a\n"), None);
    }

    #[test]
    fn n2n_has_no_key_among_its_options() {
        let options = n2n_options(&END, "192.0.2.2:7654".to_owned()).join(" ");
        let expected =
            "-d dev0 -a 198.18.12.1 -s 255.255.255.0 -c weft -l 192.0.2.2:7654 -p 7653 -M 1420";
        assert_eq!(options, expected);
    }

    #[test]
    fn yggdrasil_keeps_its_key_and_looks_for_nobody() {
        let generated =
            || json!({"PrivateKey": "0a", "IfMTU": 65_535, "MulticastInterfaces": [{}]});
        let first = yggdrasil_config(&END, generated());
        assert_eq!((&first["PrivateKey"], &first["IfMTU"]), (&json!("0a"), &json!(65_535)));
        assert_eq!((&first["MulticastInterfaces"], &first["Peers"]), (&json!([]), &json!([])));
        assert_eq!(first["Listen"], json!(["tcp://192.0.2.1:9001"]));
        let second = yggdrasil_config(&OTHER, generated());
        assert_eq!((&second["IfName"], &second["Listen"]), (&json!("dev0"), &json!([])));
        assert_eq!(second["Peers"], json!(["tcp://192.0.2.1:9001"]));
    }
}
