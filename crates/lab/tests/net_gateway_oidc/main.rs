//! Users log in to the gateway at an identity provider. The provider is zitadel/oidc, the browser is curl, and the client
//! is Debian's `openvpn`.

mod stage;

use anyhow::ensure;
use weft_lab::net::gateway::{CONNECTED, LIMIT, connected, connected_again};

use crate::stage::{Browser, Stage, WEBAUTH};

#[test]
fn a_user_logs_in_once_and_a_token_does_for_keys_and_a_new_daemon() -> anyhow::Result<()> {
    let Some(mut stage) = Stage::new()? else { return Ok(()) };
    stage.serve(&[])?;
    let profile = stage.profile("anna")?;
    let words = [&WEBAUTH[..], &["--reneg-sec", "5"]].concat();
    let mut process = stage.machine.start_with(&profile, &words)?;
    let page = stage.page(&mut process, "WEB_AUTH::")?;
    let shown = stage.browser("anna").log_in(&page, "anna")?;
    ensure!(shown.contains("<h1>Connected</h1>") && shown.contains("as anna"), "{shown}");
    let mut client = connected(process)?;
    ensure!(client.pushed.contains("auth-token-user"), "{}", client.pushed);
    let gateway = client.dns()?.into();
    stage.machine.wait_ping(gateway)?;
    ensure!(stage.names()? == [("anna".into(), "anna".into())], "{:?}", stage.names()?);
    for _ in 0..2 {
        client.process.line_with("PUSH_REPLY,auth-token", LIMIT)?;
    }
    // The provider is away, and the daemon is another: nobody opens a page.
    stage.stop_provider();
    let host = stage.host();
    host.kill_daemon();
    host.start_daemon(&[])?;
    connected_again(&mut client.process)?;
    stage.machine.wait_ping(gateway)?;
    ensure!(stage.names()? == [("anna".into(), "anna".into())], "{:?}", stage.names()?);
    ensure!(stage.drops("login_token_refused")? == 0);
    // A new login has to wait for the provider: the browser is told so, and the client waits.
    let mut process = stage.machine.start_with(&stage.profile("berta")?, &WEBAUTH)?;
    let page = stage.page(&mut process, "WEB_AUTH::")?;
    let shown = stage.browser("berta").open(&page)?;
    ensure!(shown.status == 502 && shown.body.contains("cannot be reached"), "{}", shown.body);
    let refused = stage.refusal(&[])?;
    ensure!(refused.contains("cannot connect to 198.51.1.2 port 443"), "{refused}");
    Ok(())
}

#[test]
fn others_are_refused_and_told_why() -> anyhow::Result<()> {
    let Some(stage) = Stage::new()? else { return Ok(()) };
    stage.serve(&["--oidc-group", "vpn"])?;
    let (anna, carl) = (stage.profile("anna")?, stage.profile("carl")?);
    stage.machine.refused(&anna, "AUTH_FAILED,Users log in by a web page here")?;
    // Another user with her certificate, and one who is in no group that is let in.
    let cases = [
        (&anna, "webauth", "WEB_AUTH::", "berta", "The certificate is another user"),
        (&carl, "openurl", "OPEN_URL:", "carl", "You are in no group that may connect"),
    ];
    for (profile, way, kind, user, text) in cases {
        let mut client = stage.machine.start_with(profile, &["--setenv", "IV_SSO", way])?;
        let page = stage.browser(user).log_in(&stage.page(&mut client, kind)?, user)?;
        ensure!(page.contains("<h1>Refused</h1>") && page.contains(text), "{page}");
        client.line_with(&format!("AUTH_FAILED,{text}"), LIMIT)?;
        client.wait(LIMIT)?;
    }
    ensure!(stage.drops("login_refused")? == 3);
    // Groups in the ID token itself.
    stage.serve(&["--oidc-group", "vpn", "--oidc-client-id", "weft-whole"])?;
    let mut client = stage.machine.start_with(&anna, &WEBAUTH)?;
    stage.browser("whole").log_in(&stage.page(&mut client, "WEB_AUTH::")?, "anna")?;
    client.line_with(CONNECTED, LIMIT)?;
    client.terminate(LIMIT)?;
    // Authorities that are not the provider's, and an issuer that is not quite its own.
    let wrong = stage.refusal(&["--oidc-ca", &stage.path("1.pem")])?;
    ensure!(wrong.contains("no TLS with 198.51.1.2"), "{wrong}");
    let wrong = stage.refusal(&["--oidc-issuer", "https://198.51.1.2/"])?;
    ensure!(wrong.contains("says that its issuer is \"https://198.51.1.2\""), "{wrong}");
    Ok(())
}

#[test]
fn a_browser_that_may_not_be_the_clients_is_asked_first() -> anyhow::Result<()> {
    const QUESTION: &str = "Is this your VPN client?";
    let Some(stage) = Stage::new()? else { return Ok(()) };
    stage.serve(&[])?;
    let carl = stage.profile("carl")?;
    // Somebody has the certificate, and sends its owner the link.
    let mut client = stage.machine.start_with(&carl, &WEBAUTH)?;
    let url = stage.page(&mut client, "WEB_AUTH::")?;
    let away = stage.browser_in(stage.host().netns(), "away").open(&url)?;
    ensure!(away.status == 200 && away.leads_to.is_empty(), "{} {}", away.status, away.leads_to);
    ensure!(away.body.contains(QUESTION) && away.body.contains("198.51.1.2"), "{}", away.body);
    client.terminate(LIMIT)?;
    // Any certificate: each browser is asked, and the sender of a link cannot answer.
    stage.serve(&["--client-name", "user"])?;
    let mut client = stage.machine.start_with(&carl, &WEBAUTH)?;
    let (url, browser) = (stage.page(&mut client, "WEB_AUTH::")?, stage.browser("asked"));
    let asked = browser.open(&url)?.body;
    ensure!(asked.contains(QUESTION) && asked.contains("198.51.1.2"), "{asked}");
    let other = stage.browser("other").post(&url, &[])?;
    ensure!(other.status == 403, "{}", other.body);
    let left = browser.post(&url, &[])?;
    browser.log_in(&left.leads_to, "anna")?;
    client.line_with(CONNECTED, LIMIT)?;
    ensure!(stage.names()? == [("anna".into(), "anna".into())], "{:?}", stage.names()?);
    Ok(())
}

#[test]
fn a_login_that_is_forged_or_repeated_is_refused() -> anyhow::Result<()> {
    let Some(stage) = Stage::new()? else { return Ok(()) };
    stage.serve(&[])?;
    let (anna, carl) = (stage.profile("anna")?, stage.profile("carl")?);

    // A state that was made up, and a browser that is another: the login is still good then. It is so once.
    let mut client = stage.machine.start_with(&anna, &WEBAUTH)?;
    let (url, browser) = (stage.page(&mut client, "WEB_AUTH::")?, stage.browser("anna"));
    ensure!(status(&browser, &back("made-up", "code=x"))? == 403);
    let state = browser.state(&url)?;
    ensure!(status(&stage.browser("other"), &back(&state, "code=x"))? == 403);
    let callback = browser.came_back(&url, "anna")?;
    ensure!(status(&browser, &callback)? == 200);
    client.line_with(CONNECTED, LIMIT)?;
    ensure!(status(&browser, &callback)? == 403, "a login comes back twice");
    client.terminate(LIMIT)?;

    // A code that was made up, the provider's refusal, another provider's answer, and the code of another login.
    for (more, text) in
        [("code=forged", "refuses the login"), ("error=access_denied", "access_denied")]
    {
        let mut client = stage.machine.start_with(&anna, &WEBAUTH)?;
        let browser = stage.browser("forged");
        let state = browser.state(&stage.page(&mut client, "WEB_AUTH::")?)?;
        ensure!(status(&browser, &back(&state, "code=x&iss=https://id.example.net"))? == 403);
        ensure!(status(&browser, &back(&state, more))? == 403);
        let said = client.line_with("AUTH_FAILED", LIMIT)?;
        ensure!(said.contains(text), "{said}");
        client.wait(LIMIT)?;
    }
    let mut first = stage.machine.start_with(&anna, &WEBAUTH)?;
    let url = stage.page(&mut first, "WEB_AUTH::")?;
    let callback = stage.browser("first").came_back(&url, "anna")?;
    let mut parts = callback.split(['?', '&']);
    let code = parts.find(|part| part.starts_with("code=")).unwrap_or_default();
    first.terminate(LIMIT)?;
    let mut second = stage.machine.start_with(&carl, &WEBAUTH)?;
    let thief = stage.browser("second");
    let state = thief.state(&stage.page(&mut second, "WEB_AUTH::")?)?;
    ensure!(status(&thief, &back(&state, code))? == 403, "a code of another login is taken");
    second.line_with("AUTH_FAILED,The identity provider refuses the login", LIMIT)?;
    second.wait(LIMIT)?;
    Ok(())
}

#[test]
fn a_login_that_nobody_finishes_ends() -> anyhow::Result<()> {
    let Some(stage) = Stage::new()? else { return Ok(()) };
    stage.serve(&["--oidc-wait", "10"])?;
    let mut client = stage.machine.start_with(&stage.profile("anna")?, &WEBAUTH)?;
    let url = stage.page(&mut client, "WEB_AUTH::")?;
    client.line_with("AUTH_FAILED,Nobody has logged in by the web page in time", LIMIT)?;
    ensure!(status(&stage.browser("late"), &url)? == 403);
    ensure!(stage.drops("login_late")? == 1);
    Ok(())
}

/// Where the provider would send a browser.
fn back(state: &str, more: &str) -> String {
    format!("{}?state={state}&{more}", stage::REDIRECT)
}

fn status(browser: &Browser<'_>, url: &str) -> anyhow::Result<u16> {
    Ok(browser.open(url)?.status)
}
