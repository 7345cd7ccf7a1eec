#![allow(clippy::unwrap_used)]

use proptest::prelude::*;

use super::*;

fn parse(text: &str) -> Message {
    Message::parse(text).unwrap()
}

/// Reads a message, writes it, and compares.
fn same(text: &str) -> Message {
    let message = parse(text);
    assert_eq!(message.to_text(), text);
    message
}

#[test]
fn requests_and_ends() {
    assert_eq!(same("PUSH_REQUEST"), Message::PushRequest);
    assert_eq!(same("EXIT"), Message::Exit);
    assert_eq!(same("HALT,maintenance"), Message::Halt("maintenance".to_owned()));
    let restart = Message::Restart { preserve: false, next_remote: true, text: "moved".to_owned() };
    assert_eq!(same("RESTART,[N]moved"), restart);
    assert!(matches!(same("RESTART"), Message::Restart { preserve: false, .. }));
    assert!(matches!(same("RESTART,[P]"), Message::Restart { preserve: true, .. }));
    assert_eq!(same("ACC,sso,3,A,abc"), Message::Custom("sso,3,A,abc".to_owned()));
    assert_eq!(same("PUSH_REPLYS,x"), Message::Unknown("PUSH_REPLYS,x".to_owned()));
    assert_eq!(Message::Halt("a\0b\nc".to_owned()).to_bytes(), b"HALT,a b c\0");
}

#[test]
fn refusals_in_all_forms() {
    let failure = |text: &str| match same(text) {
        Message::AuthFailed(failure) => failure,
        other => panic!("{other:?}"),
    };
    assert_eq!(failure("AUTH_FAILED"), AuthFailure::Plain);
    let text = "Data channel cipher negotiation failed (no shared cipher)";
    assert_eq!(failure(&format!("AUTH_FAILED,{text}")), AuthFailure::Text(text.to_owned()));
    let session = AuthFailure::Session("token expired".to_owned());
    assert_eq!(failure("AUTH_FAILED,SESSION: token expired"), session);
    let text = "TEMPORARY outage";
    assert_eq!(failure(&format!("AUTH_FAILED,{text}")), AuthFailure::Text(text.to_owned()));
    let busy = |backoff_s, advance, text: &str| AuthFailure::Temporary {
        backoff_s,
        advance,
        text: text.to_owned(),
    };
    assert_eq!(
        failure("AUTH_FAILED,TEMP[backoff 42,advance no]:server: busy"),
        busy(Some(42), Some(Advance::No), "server: busy")
    );
    assert_eq!(failure("AUTH_FAILED,TEMP"), busy(None, None, ""));
    let odd = parse("AUTH_FAILED,TEMP[backoff x,what,advance remote]no colon");
    assert_eq!(odd, Message::AuthFailed(busy(None, Some(Advance::Remote), "")));
    let old = busy(None, None, "busy").for_old_client();
    assert_eq!(old, AuthFailure::Text("busy".to_owned()));
    let challenge = Challenge {
        echo: true,
        has_response: true,
        state: "Om01u7Fh4LrGBS7uh0SWmzwabUiGiW6l".to_owned(),
        user: "cr1".to_owned(),
        text: "Please enter token PIN: now".to_owned(),
    };
    let text =
        "AUTH_FAILED,CRV1:R,E:Om01u7Fh4LrGBS7uh0SWmzwabUiGiW6l:Y3Ix:Please enter token PIN: now";
    assert_eq!(failure(text), AuthFailure::Challenge(challenge.clone()));
    let answer = challenge.answer("8675309");
    assert_eq!(answer.expose(), "CRV1::Om01u7Fh4LrGBS7uh0SWmzwabUiGiW6l::8675309");
    let form = PasswordForm::parse(answer.expose());
    let response = Secret::new("8675309");
    assert_eq!(form, PasswordForm::DynamicChallenge { state: challenge.state, response });
    assert_eq!(form.to_secret(), answer);
    let broken = "CRV1:R:only";
    assert_eq!(failure(&format!("AUTH_FAILED,{broken}")), AuthFailure::Text(broken.to_owned()));
}

#[test]
fn passwords_with_answers() {
    let form = PasswordForm::parse("SCRV1:cGFzcw==:MTIz");
    let (password, response) = (Secret::new("pass"), Secret::new("123"));
    assert_eq!(form, PasswordForm::StaticChallenge { password, response });
    assert_eq!(form.to_secret().expose(), "SCRV1:cGFzcw==:MTIz");
    for plain in ["pass", "SCRV1:!:!", "CRV1::x", ""] {
        assert_eq!(PasswordForm::parse(plain), PasswordForm::Plain(Secret::new(plain)));
    }
    assert!(!format!("{form:?}").contains("pass\""));
}

#[test]
fn logins_outside_of_the_tunnel() {
    assert_eq!(same("AUTH_PENDING"), Message::AuthPending { timeout_s: None });
    assert_eq!(same("AUTH_PENDING,timeout 240"), Message::AuthPending { timeout_s: Some(240) });
    let odd = parse("AUTH_PENDING,what,timeout 60,more");
    assert_eq!(odd, Message::AuthPending { timeout_s: Some(60) });
    for text in [
        "WEB_AUTH:hidden,external:https://sso.example/a?b=c:d",
        "WEB_AUTH::https://sso.example/",
        "OPEN_URL:https://sso.example/",
        "CR_TEXT:R,E:Enter code: from the phone",
    ] {
        let Message::InfoPre(content) = same(&format!("INFO_PRE,{text}")) else { panic!() };
        assert_eq!(PendingStep::parse(&content).unwrap().to_text(), text);
    }
    assert_eq!(PendingStep::parse("TALK:x"), None);
    let answer = same("CR_RESPONSE,MTIzNDU2");
    assert_eq!(answer, Message::ChallengeResponse(Secret::new("123456")));
    assert!(!format!("{answer:?}").contains("123456"));
    let error = Message::parse("CR_RESPONSE,!!").unwrap_err();
    assert!(error.to_string().contains("is not base64"));
}

#[test]
fn a_long_push_is_cut_and_put_together() {
    let options: Vec<String> =
        (0..200).map(|at| format!("route 10.{at}.0.0 255.255.0.0")).collect();
    let parts = push_reply(&options).unwrap();
    assert!(parts.len() > 5);
    let (last, before) = parts.split_last().unwrap();
    assert_eq!(last.continuation, Continuation::Last);
    assert!(before.iter().all(|part| part.continuation == Continuation::More));
    let mut collector = PushCollector::default();
    for part in before {
        let bytes = Message::PushReply(part.clone()).to_bytes();
        assert!(
            bytes.len() <= PUSH_MESSAGE_BYTES_MAX && bytes.ends_with(b",push-continuation 2\0")
        );
        let Message::PushReply(part) =
            parse(std::str::from_utf8(&bytes[..bytes.len() - 1]).unwrap())
        else {
            panic!()
        };
        assert_eq!(collector.handle_part(part), Ok(None));
    }
    assert_eq!(collector.handle_part(last.clone()), Ok(Some(options)));
    let few = push_reply(&["ping 10".to_owned(), "ping-restart 60".to_owned()]).unwrap();
    assert_eq!(few.len(), 1);
    assert_eq!(Message::PushReply(few[0].clone()).to_text(), "PUSH_REPLY,ping 10,ping-restart 60");
    assert_eq!(Message::PushReply(push_reply(&[]).unwrap()[0].clone()).to_text(), "PUSH_REPLY");
}

/// The last of three messages of a server of OpenVPN 2.6.14.
#[test]
fn a_real_push_is_understood() {
    let text = "PUSH_REPLY,route 172.16.57.0 255.255.255.0,tun-ipv6,route-gateway 10.9.0.1,topology subnet,\
                ping 10,ping-restart 60,ifconfig-ipv6 fd00:9::1000/64 fd00:9::1,\
                ifconfig 10.9.0.2 255.255.255.0,peer-id 0,auth-token SESS_ID,cipher AES-256-GCM,\
                protocol-flags cc-exit tls-ekm dyn-tls-crypt,tun-mtu 1500,push-continuation 1";
    let Message::PushReply(part) = same(text) else { panic!() };
    assert_eq!(part.continuation, Continuation::Last);
    let options: Vec<PushOption> =
        part.options.iter().map(|option| PushOption::parse(option).unwrap()).collect();
    let unknown: Vec<&PushOption> =
        options.iter().filter(|option| matches!(option, PushOption::Other(_))).collect();
    assert_eq!(unknown, [&PushOption::Other(vec!["tun-ipv6".to_owned()])]);
    assert!(options.contains(&PushOption::TunMtu(1500)));
    assert!(!format!("{options:?}{part:?}").contains("SESS_ID"));
}

#[test]
fn what_cannot_be_pushed_is_refused() {
    let comma = vec!["echo a,b".to_owned()];
    assert_eq!(push_reply(&comma), Err(MessageError::UnpushableCharacter("echo".into())));
    let long = vec!["x".repeat(PUSH_OPTION_BYTES_MAX + 1)];
    let error = push_reply(&long).unwrap_err();
    assert!(error.to_string().contains("has 256 bytes"), "{error}");
    let mut collector = PushCollector::default();
    let part = PushPart { options: vec![String::new(); 5_000], continuation: Continuation::More };
    assert_eq!(collector.handle_part(part.clone()), Ok(None));
    assert_eq!(collector.handle_part(part), Err(MessageError::TooMuchPushed));
}

#[test]
fn updates_have_marks() {
    let Message::PushUpdate(part) = same("PUSH_UPDATE,-route,?block-ipv6,-?dns,ping 5") else {
        panic!()
    };
    let options: Vec<PushUpdateOption> =
        part.options.iter().map(|option| PushUpdateOption::parse(option)).collect();
    let marks: Vec<(bool, bool, &str)> = options
        .iter()
        .map(|update| (update.removes, update.optional, update.option.as_str()))
        .collect();
    let expected = [
        (true, false, "route"),
        (false, true, "block-ipv6"),
        (true, true, "dns"),
        (false, false, "ping 5"),
    ];
    assert_eq!(marks, expected);
    assert_eq!(push_update(&options).unwrap(), [part]);
}

#[test]
fn options_have_their_meaning() {
    for text in [
        "ifconfig 10.8.0.2 255.255.255.0",
        "ifconfig-ipv6 fd00::1002/64 fd00::1",
        "topology subnet",
        "route 10.9.0.0 255.255.0.0",
        "route 10.9.0.0 255.255.0.0 net_gateway 5",
        "route remote_host 255.255.255.255 net_gateway",
        "route-ipv6 fd01::/48",
        "route-ipv6 fd01::/48 default 7",
        "route-gateway 10.8.0.1",
        "route-gateway dhcp",
        "route-metric 9",
        "redirect-gateway def1 !ipv4",
        "redirect-private",
        "dhcp-option DNS 10.8.0.1",
        "dhcp-option DOMAIN-SEARCH weft.local",
        "dns server 0 address 10.8.0.1",
        "block-outside-dns",
        "block-ipv6",
        "register-dns",
        "ping 10",
        "ping-restart 60",
        "ping-exit 60",
        "inactive 600 1000",
        "inactive 600",
        "session-timeout 3600",
        "explicit-exit-notify 2",
        "peer-id 7",
        "cipher AES-256-GCM",
        "protocol-flags cc-exit tls-ekm dyn-tls-crypt aead-epoch",
        "key-derivation tls-ekm",
        "tun-mtu 1420",
        "auth-token SESS_ID_AT_x",
        "auth-token-user YW5uYQ==",
        "compress stub-v2",
        "echo \"a b\"",
        "setenv-safe X \"a\\\"b\"",
    ] {
        assert_eq!(PushOption::parse(text).unwrap().to_text().unwrap(), text);
    }
    let route = PushOption::parse("route 10.9.0.1").unwrap();
    assert_eq!(route.to_text().unwrap(), "route 10.9.0.1 255.255.255.255");
    let metric = PushOption::parse("route 10.9.0.0 255.255.0.0 default 5").unwrap();
    assert_eq!(metric.to_text().unwrap(), "route 10.9.0.0 255.255.0.0 vpn_gateway 5");
    let PushOption::ProtocolFlags(flags) = PushOption::parse("protocol-flags tls-ekm x").unwrap()
    else {
        panic!()
    };
    assert_eq!(flags, ProtocolFlags { tls_ekm: true, ..ProtocolFlags::default() });
}

#[test]
fn bad_options_are_named() {
    let error = |text: &str| PushOption::parse(text).unwrap_err().to_string();
    assert!(error("ping ten").contains("ping has a bad value \"ten\""));
    assert!(error("ifconfig 10.8.0.2").contains("a value too few"));
    assert!(error("peer-id 16777215").contains("below 16777215"));
    assert!(error("ifconfig-ipv6 fd00::1/129").contains("prefix length"));
    assert!(error("route \"10").contains("close the quotation"));
    assert!(error("route \"a b\"").contains("route has a bad value \"a b\""));
    assert!(error("auth-token-user !").contains("base64"));
}

proptest! {
    #[test]
    fn no_text_makes_a_reader_panic(
        word in prop::sample::select(vec![
            "", "PUSH_REPLY", "PUSH_UPDATE", "AUTH_FAILED", "AUTH_PENDING", "INFO_PRE", "CR_RESPONSE", "RESTART",
        ]),
        content in "[ -~]{0,60}", prefix in prop::sample::select(vec!["", "CRV1:", "TEMP[", "[", "WEB_AUTH:", "-?"]),
    ) {
        let text = format!("{word},{prefix}{content}");
        if let Ok(message) = Message::parse(&text) {
            let again = Message::parse(&message.to_text()).unwrap();
            prop_assert_eq!(again.to_text(), message.to_text());
        }
        let _ = PendingStep::parse(&content);
        let _ = PasswordForm::parse(&format!("{prefix}{content}"));
        let _ = PushUpdateOption::parse(&format!("{prefix}{content}"));
    }

    #[test]
    fn options_that_are_read_are_written_with_the_same_meaning(
        name in prop::sample::select(vec![
            "ifconfig", "route", "route-ipv6", "dhcp-option", "dns", "inactive", "echo", "topology", "peer-id",
        ]),
        values in "[ -~]{0,40}",
    ) {
        if let Ok(option) = PushOption::parse(&format!("{name} {values}")) {
            let text = option.to_text().unwrap();
            prop_assert_eq!(PushOption::parse(&text).unwrap().to_text().unwrap(), text);
        }
    }

    #[test]
    fn any_options_come_back_in_order(options in prop::collection::vec("[a-z0-9 ]{1,250}", 0..40)) {
        let options: Vec<String> = options.into_iter().map(|option| format!("x{option}")).collect();
        let mut collector = PushCollector::default();
        let mut whole = None;
        for part in push_reply(&options).unwrap() {
            prop_assert!(whole.is_none());
            let text = Message::PushReply(part).to_text();
            prop_assert!(text.len() < PUSH_MESSAGE_BYTES_MAX);
            let Ok(Message::PushReply(part)) = Message::parse(&text) else { panic!() };
            whole = collector.handle_part(part).unwrap();
        }
        prop_assert_eq!(whole, Some(options));
    }
}
