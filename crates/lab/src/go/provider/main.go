// An identity provider for tests: zitadel/oidc, a certified library of OpenID providers, with the login page and the
// storage of its example. Added are TLS, groups, and a client whose ID token has all claims.
package main

import (
	"context"
	"encoding/json"
	"log"
	"net"
	"net/http"
	"os"

	"github.com/zitadel/oidc/v3/example/server/exampleop"
	"github.com/zitadel/oidc/v3/example/server/storage"
	"github.com/zitadel/oidc/v3/pkg/oidc"
	"github.com/zitadel/oidc/v3/pkg/op"
)

// A client whose ID token has what others ask the userinfo endpoint for.
type whole struct{ op.Client }

func (whole) IDTokenUserinfoClaimsAssertion() bool { return true }

type store struct {
	*storage.Storage
	groups map[string][]string
}

func (s store) GetClientByClientID(ctx context.Context, id string) (op.Client, error) {
	client, err := s.Storage.GetClientByClientID(ctx, id)
	if err == nil && id == "weft-whole" {
		return whole{client}, nil
	}
	return client, err
}

func (s store) SetUserinfoFromRequest(ctx context.Context, info *oidc.UserInfo, token op.IDTokenRequest, scopes []string) error {
	err := s.Storage.SetUserinfoFromRequest(ctx, info, token, scopes)
	if client, known := token.(interface{ GetClientID() string }); known && client.GetClientID() == "weft-whole" {
		info.AppendClaims("groups", s.groups[token.GetSubject()])
	}
	return err
}

func (s store) SetUserinfoFromToken(ctx context.Context, info *oidc.UserInfo, id, subject, origin string) error {
	err := s.Storage.SetUserinfoFromToken(ctx, info, id, subject, origin)
	info.AppendClaims("groups", s.groups[subject])
	return err
}

// Arguments: issuer, address and port, certificate, key, users, groups by user, where browsers come back to, and the
// clients' secret.
func main() {
	arguments := os.Args[1:]
	if len(arguments) != 8 {
		log.Fatal("ISSUER LISTEN CERTIFICATE KEY USERS GROUPS REDIRECT SECRET")
	}
	issuer, listen, certificate, key := arguments[0], arguments[1], arguments[2], arguments[3]
	users, err := storage.StoreFromFile(arguments[4])
	if err != nil {
		log.Fatal(err)
	}
	text, err := os.ReadFile(arguments[5])
	if err != nil {
		log.Fatal(err)
	}
	groups := map[string][]string{}
	if err := json.Unmarshal(text, &groups); err != nil {
		log.Fatal(err)
	}
	redirect, secret := arguments[6], arguments[7]
	storage.RegisterClients(
		storage.WebClient("weft", secret, redirect),
		storage.WebClient("weft-whole", secret, redirect),
	)
	router := exampleop.SetupServer(issuer, store{storage.NewStorage(users), groups}, nil, false)
	listener, err := net.Listen("tcp", listen)
	if err != nil {
		log.Fatal(err)
	}
	log.Print("serving")
	log.Fatal(http.ServeTLS(listener, router, certificate, key))
}
