//! Certificates and keys that do not fit the server's: their clients are told, or get no answer; others go on.

use std::time::Duration;

use anyhow::ensure;
use weft_bench::sandbox::try_wait_until;
use weft_lab::net::gateway::{LIMIT, Machine};

use crate::pki::{Keys, Pki, run};
use crate::stage::{SERVER, Stage};

/// Less than a client waits for an answer, and more than one takes.
const SILENT: Duration = Duration::from_secs(5);

fn drops(stage: &Stage, reason: &str) -> anyhow::Result<u64> {
    let status = stage.host().weft_json(&["status"])?;
    Ok(status["gateway"]["drops"][reason].as_u64().unwrap_or_default())
}

/// A client with this profile gets no answer at all, and the drop is counted.
fn is_silent(stage: &Stage, machine: &Machine, profile: &std::path::Path) -> anyhow::Result<()> {
    let before = drops(stage, "first_packet_refused")?;
    let mut client = machine.start(profile)?;
    let shown = profile.display();
    let answered = client.line_with("TLS: Initial packet", SILENT);
    ensure!(answered.is_err(), "{shown}: it is answered: {answered:?}");
    ensure!(client.ended()?.is_none(), "{shown}: {answered:?}");
    client.terminate(LIMIT)?;
    ensure!(drops(stage, "first_packet_refused")? > before, "{shown}: nothing is counted");
    Ok(())
}

#[test]
fn clients_with_wrong_certificates_or_keys_are_kept_out_by_name() -> anyhow::Result<()> {
    let stage = Stage::new(Keys::Ecdsa)?;
    let (one, two) = (stage.machine(1)?, stage.machine(2)?);
    let key = |file: &str| stage.pki.text(file);
    run(&stage.folder, "openvpn", &["--genkey", "secret", "ta2.key"])?;
    let wrapped = |block: &str, file: &str| -> anyhow::Result<String> {
        Ok(format!("<{block}>\n{}</{block}>", key(file)?))
    };
    stage.pki.issue_between("expired", "client", "20200101000000Z", "20210101000000Z")?;
    stage.pki.issue_between("early", "client", "20980101000000Z", "20990101000000Z")?;
    // Another authority of the same name.
    let others = Pki::new(&stage.folder.join("others"), Keys::Ecdsa)?;
    others.issue("foreign", "foreign", "client", 825)?;
    for file in ["foreign.crt", "foreign.key"] {
        std::fs::copy(stage.folder.join("others").join(file), stage.folder.join(file))?;
    }
    stage.imported(&format!("{SERVER}tls-crypt ta.key\n"), &[])?;
    stage.serve(&[])?;
    let right = wrapped("tls-crypt", "ta.key")?;
    let good = one.connect(&stage.profile("good", &right)?)?;
    for (name, alert) in [
        ("expired", "certificate expired"),
        ("early", "certificate expired"),
        ("foreign", "fatal SSL alert"),
    ] {
        let before = drops(&stage, "handshake_failed")?;
        two.refused(&stage.profile(name, &right)?, alert)?;
        ensure!(drops(&stage, "handshake_failed")? > before, "{name}: nothing is counted");
    }
    // Wrong keys, and wrong wrappings.
    let direction = format!("key-direction 1\n{}", wrapped("tls-auth", "ta.key")?);
    for (name, more) in
        [("other", wrapped("tls-crypt", "ta2.key")?), ("none", String::new()), ("auth", direction)]
    {
        is_silent(&stage, &two, &stage.profile(name, &more)?)?;
    }
    let clients = stage.clients()?;
    ensure!(clients.len() == 1 && clients[0]["name"] == "good", "{clients:?}");
    one.wait_ping("10.8.0.1".parse()?)?;
    drop(good);
    // The same of tls-auth: the key, the direction, the digest.
    stage.imported(&format!("{SERVER}tls-auth ta.key 0\n"), &[])?;
    try_wait_until("the gateway to count anew", LIMIT, || {
        Ok(drops(&stage, "first_packet_refused").is_ok_and(|count| count == 0))
    })?;
    for (name, more) in [
        ("other2", format!("key-direction 1\n{}", wrapped("tls-auth", "ta2.key")?)),
        ("direction", format!("key-direction 0\n{}", wrapped("tls-auth", "ta.key")?)),
        ("digest", format!("auth SHA1\nkey-direction 1\n{}", wrapped("tls-auth", "ta.key")?)),
    ] {
        let profile = stage.profile(name, &more)?;
        if name == "digest" {
            let text = std::fs::read_to_string(&profile)?;
            std::fs::write(&profile, text.replace("auth SHA256\n", ""))?;
        }
        is_silent(&stage, &two, &profile)?;
    }
    Ok(())
}
