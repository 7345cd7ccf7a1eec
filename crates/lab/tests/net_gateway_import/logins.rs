//! Users of a server that asks for passwords go on with the profiles that they have, over TCP as well.

use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;

use anyhow::{Context, ensure};
use weft_lab::net::gateway::{LIMIT, address_in, connected_again};

use crate::pki::Keys;
use crate::stage::{SERVER, Stage};

/// What judges names and passwords, at the stock server and at the gateway.
const JUDGE: &str = "#!/bin/sh
{ read -r user; read -r password; } < \"$1\"
case \"$user $password\" in
'anna right' | 'berta right') exit 0 ;;
esac
exit 1
";
/// Refuses everybody, and has clients show what it was told.
const WITNESS: &str = "#!/bin/sh
echo \"$common_name $username $tls_serial_0 $tls_serial_hex_0 $untrusted_ip $script_type\" \\
    \"$REQUIRED_GROUP $OPENVPN_ROOM $IV_PLAT $UV_TEAM\" > \"$auth_failed_reason_file\"
exit 1
";
const FIXED: &str = "10.8.0.60";
const WRONG: &str = "AUTH_FAILED,Wrong user name or password";

/// The path of the judge.
pub(crate) fn judge(stage: &Stage) -> anyhow::Result<String> {
    program(stage, "judge", JUDGE)
}

fn program(stage: &Stage, name: &str, text: &str) -> anyhow::Result<String> {
    let path = stage.write(name, text)?;
    std::fs::set_permissions(&path, PermissionsExt::from_mode(0o755))?;
    Ok(path)
}

/// A profile whose user name and password stand in a file.
pub(crate) fn profile(
    stage: &Stage,
    name: &str,
    user: &str,
    password: &str,
) -> anyhow::Result<PathBuf> {
    let login = stage.write(&format!("{name}.login"), &format!("{user}\n{password}\n"))?;
    let profile = stage.profile(name, "")?;
    let text = std::fs::read_to_string(&profile)?;
    std::fs::write(&profile, format!("{text}auth-user-pass {login}\n"))?;
    Ok(profile)
}

/// The profile without certificate and key.
fn without_certificate(profile: &PathBuf) -> anyhow::Result<()> {
    let mut text = std::fs::read_to_string(profile)?;
    for block in ["cert", "key"] {
        let (start, end) = (format!("<{block}>\n"), format!("</{block}>\n"));
        let (Some(from), Some(to)) = (text.find(&start), text.find(&end)) else { continue };
        text.replace_range(from..to + end.len(), "");
    }
    Ok(std::fs::write(profile, text)?)
}

#[test]
fn users_without_certificates_go_on_over_tcp() -> anyhow::Result<()> {
    let stage = Stage::new(Keys::Ecdsa)?;
    let mut machine = stage.machine(1)?;
    machine.is_tcp = true;
    let server = SERVER.replace("proto udp", "proto tcp").replace("explicit-exit-notify 1\n", "");
    let config = format!(
        "{server}script-security 2\nauth-user-pass-verify {} via-file\nverify-client-cert none\n\
         username-as-common-name\nauth-gen-token 3600\n",
        judge(&stage)?
    );
    stage.write("ccd/anna", &format!("ifconfig-push {FIXED} 255.255.255.0\n"))?;
    stage.write("ccd/berta", "disable\n")?;
    let anna = profile(&stage, "anna", "anna", "right")?;
    without_certificate(&anna)?;
    let mut stock = stage.stock(&config)?;
    let mut client = machine.connect(&anna)?;
    ensure!(client.address.to_string() == FIXED, "{}", client.pushed);
    stock.terminate(LIMIT)?;

    stage.imported(&config, &[])?;
    let served = stage.serve(&[])?;
    ensure!(served["listen"][0] == "tcp:0.0.0.0:1194" && served["auth"] == "password", "{served}");
    // The token of the stock server is refused once; the same process has the password.
    let pushed = connected_again(&mut client.process)?;
    ensure!(address_in(&pushed, "ifconfig ")?.to_string() == FIXED, "{pushed}");
    ensure!(pushed.contains("auth-token"), "{pushed}");
    machine.wait_ping("10.8.0.1".parse()?)?;
    let listed = stage.clients()?;
    ensure!(listed[0]["name"] == "anna" && listed[0]["protocol"] == "tcp", "{listed:?}");
    client.process.terminate(LIMIT)?;
    for (user, password, text) in
        [("anna", "wrong", WRONG), ("berta", "right", "AUTH_FAILED,This client is disabled")]
    {
        let profile = profile(&stage, user, user, password)?;
        without_certificate(&profile)?;
        machine.refused(&profile, text)?;
    }
    // A profile for all users.
    let text = stage.host().weft(&["openvpn", "client", "--shared"])?.success()?.stdout;
    ensure!(text.contains("\nauth-user-pass\n") && !text.contains("<key>"), "{text}");
    ensure!(text.contains(" 1194 tcp\n"), "{text}");
    Ok(())
}

#[test]
fn a_program_is_told_what_openvpn_tells_it() -> anyhow::Result<()> {
    const FAILED: &str = "AUTH_FAILED,";
    let stage = Stage::new(Keys::Ecdsa)?;
    let machine = stage.machine(1)?;
    let config = format!(
        "{SERVER}script-security 2\nauth-user-pass-verify {} via-file\n\
         setenv REQUIRED_GROUP vpn\nsetenv-safe ROOM 7\n",
        program(&stage, "witness", WITNESS)?
    );
    let profile = profile(&stage, "laptop", "anna", "right")?;
    let told = || -> anyhow::Result<String> {
        let mut client =
            machine.start_with(&profile, &["--push-peer-info", "--setenv", "UV_TEAM", "net"])?;
        let line = client.line_with(FAILED, LIMIT)?;
        client.terminate(LIMIT)?;
        let text = line.split_once(FAILED).map(|(_, text)| text.to_owned());
        text.with_context(|| format!("no reason: {line}"))
    };
    let mut stock = stage.stock(&config)?;
    let by_stock = told()?;
    stock.terminate(LIMIT)?;
    let known = by_stock.starts_with("laptop anna ") && by_stock.contains("vpn 7 linux net");
    ensure!(known, "{by_stock}");
    stage.imported(&config, &[])?;
    stage.serve(&[])?;
    let by_weft = told()?;
    ensure!(by_weft == by_stock, "{by_weft:?} in the place of {by_stock:?}");
    Ok(())
}

#[test]
fn a_program_stands_for_the_plugin_of_pam() -> anyhow::Result<()> {
    let stage = Stage::new(Keys::Ecdsa)?;
    let machine = stage.machine(1)?;
    let plugin = "plugin /usr/lib/openvpn/openvpn-plugin-auth-pam.so login";
    let config = format!("{SERVER}{plugin}\n");
    let refused = stage.import(&config, &["--without-refused"])?;
    ensure!(refused.status.code() == Some(5), "{refused:?}");
    ensure!(refused.stdout.contains("a program asks PAM here"), "{}", refused.stdout);
    let program = judge(&stage)?;
    for (program, text) in [("judge", "no absolute path"), ("/nonexistent", "cannot look at")] {
        let refused = stage.import(&config, &["--auth-program", program])?;
        ensure!(refused.stdout.contains(text), "{}", refused.stdout);
    }
    let needless = stage.import(SERVER, &["--auth-program", &program])?;
    ensure!(needless.stdout.contains("leave --auth-program out"), "{}", needless.stdout);
    let report = stage.imported(&config, &["--auth-program", &program])?;
    let lines = report["lines"].as_array().map(Vec::as_slice).unwrap_or_default();
    let line = lines.iter().find(|line| line["text"] == plugin);
    ensure!(line.is_some_and(|line| line["verdict"] == "nothing"), "{report:#}");
    let served = stage.serve(&[])?;
    ensure!(served["auth"] == "both", "{served}");

    // Known by the certificate; without auth-gen-token there are no tokens.
    let good = profile(&stage, "laptop", "anna", "right")?;
    let mut client = machine.connect(&good)?;
    ensure!(!client.pushed.contains("auth-token"), "{}", client.pushed);
    let listed = stage.clients()?;
    ensure!(listed[0]["name"] == "laptop" && listed[0]["user"] == "anna", "{listed:?}");
    client.process.terminate(LIMIT)?;
    machine.refused(&profile(&stage, "laptop", "anna", "wrong")?, WRONG)?;
    let bare = profile(&stage, "laptop", "anna", "right")?;
    without_certificate(&bare)?;
    // TLS itself refuses a client without a certificate.
    machine.refused(&bare, "fatal SSL alert")?;
    Ok(())
}
