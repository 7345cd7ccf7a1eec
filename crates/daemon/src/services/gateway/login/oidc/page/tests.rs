//! Who is asked, who may come in, and by which certificate.
#![allow(clippy::unwrap_used)]

use std::sync::Mutex;

use http_body_util::BodyExt;
use tempfile::TempDir;
use tokio::sync::Semaphore;

use super::super::https::{Ask, Https};
use super::super::pending::Who;
use super::super::provider::Provider;
use super::super::settings::Place;
use super::*;

/// The files of a certificate for this host, and of its private key.
fn certified(dir: &TempDir, name: &str) -> (PathBuf, PathBuf) {
    let made = rcgen::generate_simple_self_signed(["127.0.0.1".to_owned()]).unwrap();
    let (certificate, key) =
        (dir.path().join(name).with_extension("pem"), dir.path().join(name).with_extension("key"));
    std::fs::write(&certificate, made.cert.pem()).unwrap();
    std::fs::write(&key, made.signing_key.serialize_pem()).unwrap();
    (certificate, key)
}

/// The logins of a gateway whose provider is away.
fn inner(asks_always: bool) -> Arc<Inner> {
    let dir = tempfile::tempdir().unwrap();
    let settings = OidcSettings {
        issuer: "https://127.0.0.1:1".into(),
        redirect: "https://vpn.example.com:9443/vpn/callback".into(),
        ca: Some(certified(&dir, "ca").0),
        ..OidcSettings::default()
    };
    Arc::new(Inner {
        provider: Provider::new(&settings, None).unwrap(),
        pending: Mutex::default(),
        exchanges: Semaphore::new(1),
        redirect: Place::of(&settings.redirect).unwrap(),
        issuer: settings.issuer,
        wait: Duration::from_secs(60),
        asks_always,
    })
}

/// A client that waits; returns its ticket.
fn waiting(inner: &Inner, from: IpAddr) -> String {
    let who = Who { certificate: "a<b>".into(), from };
    lock(&inner.pending).add(who, oneshot::channel().0).unwrap()
}

async fn text(response: Response) -> String {
    let body = response.into_body().collect().await.unwrap();
    String::from_utf8(body.to_bytes().to_vec()).unwrap()
}

async fn begun(inner: &Arc<Inner>, at: IpAddr, ticket: &str) -> Response {
    let login = Query(Login { t: ticket.to_owned() });
    begin(State(Arc::clone(inner)), Extension(Browser(at)), login).await
}

fn cookie(response: &Response) -> String {
    response.headers()[header::SET_COOKIE].to_str().unwrap().to_owned()
}

#[tokio::test]
async fn a_browser_elsewhere_than_its_client_is_asked_first() {
    let [here, elsewhere]: [IpAddr; 2] = ["192.0.2.7", "192.0.2.8"].map(|it| it.parse().unwrap());
    for (asks_always, at, is_asked) in
        [(false, here, false), (false, elsewhere, true), (true, here, true)]
    {
        let inner = inner(asks_always);
        let response = begun(&inner, at, &waiting(&inner, here)).await;
        let cookie = cookie(&response);
        assert!(cookie.starts_with("__Host-weft-login="), "{cookie}");
        assert!(cookie.ends_with("; Path=/; Secure; HttpOnly; SameSite=Lax"), "{cookie}");
        let page = text(response).await;
        assert_eq!(page.contains("Is this your VPN client?"), is_asked, "{at}: {page}");
        assert_eq!(page.contains("192.0.2.7 with the certificate a&lt;b&gt;"), is_asked, "{page}");
        // It is sent on to the provider, which is away.
        assert_eq!(page.contains("cannot be reached"), !is_asked, "{at}: {page}");
    }
}

#[tokio::test]
async fn the_browser_that_was_asked_alone_says_yes_and_by_that_page() {
    let inner = inner(true);
    let at = "192.0.2.7".parse().unwrap();
    let ticket = waiting(&inner, at);
    let own = cookie(&begun(&inner, at, &ticket).await);
    let own = own.split(';').next().unwrap();
    // 502: it is sent on to the provider, which is away.
    let cases = [
        (own, Some("same-origin"), 502),
        (own, None, 502),
        (own, Some("same-site"), 403),
        (own, Some("cross-site"), 403),
        (own, Some("none"), 403),
        ("__Host-weft-login=x", Some("same-origin"), 403),
        ("other=x", Some("same-origin"), 403),
    ];
    for (cookie, site, status) in cases {
        let mut headers = HeaderMap::new();
        headers.insert(header::COOKIE, cookie.parse().unwrap());
        if let Some(site) = site {
            headers.insert(SITE, HeaderValue::from_static(site));
        }
        let login = Query(Login { t: ticket.clone() });
        let response = agree(State(Arc::clone(&inner)), login, headers).await;
        assert_eq!(response.status().as_u16(), status, "{cookie} {site:?}");
    }
}

#[tokio::test]
async fn the_old_certificate_goes_on_where_the_new_one_is_none() {
    for is_good in [false, true] {
        let dir = tempfile::tempdir().unwrap();
        let (certificate, key) = certified(&dir, "used");
        let settings = OidcSettings {
            certificate: Some(certificate.clone()),
            key: Some(key.clone()),
            ..OidcSettings::default()
        };
        let place = "127.0.0.1:0".parse().unwrap();
        let mut listener = Listener::open(&[place], &settings).await.unwrap();
        let at = listener.listeners[0].local_addr().unwrap();
        let expected = dir.path().join("expected.pem");
        std::fs::copy(&certificate, &expected).unwrap();
        if is_good {
            let (new, new_key) = certified(&dir, "new");
            std::fs::copy(&new, &expected).unwrap();
            std::fs::copy(&new, &certificate).unwrap();
            std::fs::copy(&new_key, &key).unwrap();
        } else {
            std::fs::write(&certificate, "none").unwrap();
        }
        listener.renew().await;
        let https = Https::new(Some(&expected)).unwrap();
        let url = format!("https://{at}/none");
        let answered = tokio::select! {
            () = serve(listener, inner(false)) => unreachable!(),
            answered = https.ask(Ask { url: &url, authorization: None, form: None }) => answered,
        };
        assert_eq!(answered.unwrap().status, StatusCode::NOT_FOUND, "is_good: {is_good}");
    }
}

#[tokio::test]
async fn one_address_has_a_part_of_the_connections_alone() {
    let mut connections = Connections::default();
    let from = |host: u8, port: u16| SocketAddr::from(([192, 0, 2, host], port));
    for port in 0..100 {
        connections.add(from(1, port), std::future::pending());
    }
    assert_eq!(connections.origins.len(), CONNECTIONS_OF_ORIGIN_MAX);
    connections.add(from(2, 0), std::future::ready(()));
    assert_eq!(connections.origins.len(), CONNECTIONS_OF_ORIGIN_MAX + 1);
    connections.ended().await;
    assert_eq!(connections.origins.len(), CONNECTIONS_OF_ORIGIN_MAX);
    // A web server of this host.
    for port in 0..1_000 {
        connections.add(SocketAddr::from(([127, 0, 0, 1], port)), std::future::pending());
    }
    assert_eq!(connections.origins.len(), CONNECTIONS_MAX);
    connections.add(from(3, 0), std::future::pending());
    assert_eq!(connections.origins.len(), CONNECTIONS_MAX);
}
